"""Conversation: the messages of a chat, and how it goes on."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from nanovllm.cli.run_stats import RunStats
from nanovllm.errors import RequestError
from nanovllm.outputs import RequestOutput
from nanovllm.prompts import as_conversations
from nanovllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from nanovllm.cli.remote import RemoteLLM
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

        An answer that an interrupt broke off is remembered as far as it came, and a question
        without any is forgotten.
        """
        messages = [*self.messages, _message("user", question)]
        [prompt] = self._llm.apply_chat_template(messages)
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


def _message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}
