"""Conversation: the messages of a chat, and how it goes on."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from nanovllm.cli.remote import RemoteLLM
from nanovllm.cli.run_stats import RunStats
from nanovllm.errors import PromptTooLongError, RequestError
from nanovllm.outputs import RequestOutput
from nanovllm.prompts import as_conversations
from nanovllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from nanovllm.llm import LLM


class Conversation:
    """The messages so far; `ask` adds a question and its answer."""

    def __init__(
        self, llm: LLM | RemoteLLM, params: SamplingParams, system: str | None = None
    ) -> None:
        self.messages: list[dict[str, Any]] = []
        self.params = params
        self.stats = RunStats()
        self.system = system
        self.num_dropped = 0  # messages that the last question left no room for
        self._llm = llm
        self.reset()

    def reset(self) -> None:
        self.messages = [] if self.system is None else [_message("system", self.system)]

    def instruct(self, system: str) -> None:
        """Give other instructions from here on, as if they had been there from the start."""
        self.system = system
        said = [message for message in self.messages if message["role"] != "system"]
        self.messages = [_message("system", system), *said]

    def ask(self, question: str, show: Callable[[str], None]) -> RequestOutput | None:
        """Stream an answer to `show`; None if it did not end.

        The oldest turns are dropped when the context has no room for them. An answer that an
        interrupt broke off is remembered as far as it came, and a question without any is
        forgotten.
        """
        messages = [*self.messages, _message("user", question)]
        self.num_dropped = 0
        while True:
            try:
                return self._answer(messages, show)
            except PromptTooLongError:
                shorter = _without_oldest_turn(messages)
                if shorter is None:
                    raise
                self.num_dropped += len(messages) - len(shorter)
                messages = shorter

    def retry(self, show: Callable[[str], None]) -> RequestOutput | None:
        """Answer the last question again; the answer so far stays if there is no other."""
        before = self.messages
        if [message["role"] for message in before[-2:]] != ["user", "assistant"]:
            raise RequestError("there is no answer to try again")
        self.messages = shorter = before[:-2]
        try:
            return self.ask(before[-2]["content"], show)
        finally:
            if self.messages is shorter:
                self.messages = before

    def _answer(
        self, messages: list[dict[str, Any]], show: Callable[[str], None]
    ) -> RequestOutput | None:
        [prompt] = self._llm.apply_chat_template(messages)
        if not self._has_room(prompt) and _without_oldest_turn(messages) is not None:
            raise PromptTooLongError("the context has no room for an answer")
        answer, output = "", None
        self.stats.resume()
        try:
            for piece in self._llm.stream(prompt, self.params, on_step=self.stats.add_step):
                answer += piece.text
                show(piece.text)
                output = piece.output
        finally:
            self.stats.pause()
            if output is not None:
                self.stats.outputs.append(output)
            if answer or output is not None:
                self.messages = [*messages, _message("assistant", answer)]
        return output

    def _has_room(self, prompt: Sequence[Any]) -> bool:
        """Whether an answer of some length fits behind the prompt; a server checks that itself."""
        if isinstance(self._llm, RemoteLLM):
            return True
        max_len = self._llm.engine.core.max_len
        return len(prompt) + min(self.params.max_new_tokens, max_len // 4) <= max_len

    def save(self, path: str) -> None:
        try:
            # Half of a surrogate pair, which a model may write, is no text of UTF-8.
            text = json.dumps(self.messages, indent=2, ensure_ascii=False).encode()
            with open(path, "wb") as file:
                file.write(text)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise RequestError(f"cannot save to {path}: {reason}") from error

    def load(self, path: str) -> None:
        try:
            with open(path, encoding="utf-8") as file:
                [messages] = as_conversations(json.load(file))
        except OSError as error:
            raise RequestError(f"cannot load {path}: {error.strerror}") from error
        except (ValueError, RecursionError) as error:  # no name, no JSON, no text or no messages
            raise RequestError(f"{path} holds no conversation: {error}") from error
        self.messages = messages
        systems = [message["content"] for message in messages if message["role"] == "system"]
        self.system = systems[0] if systems else None


def _without_oldest_turn(messages: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
    """Drop the first message of the user and what follows it up to the next; None if none does."""
    users = [i for i, message in enumerate(messages) if message["role"] == "user"]
    return None if len(users) < 2 else messages[: users[0]] + messages[users[1] :]


def _message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}
