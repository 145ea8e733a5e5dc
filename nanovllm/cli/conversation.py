"""Conversation: the messages of a chat."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from nanovllm.cli.output import RunStats
from nanovllm.client import RemoteLLM
from nanovllm.errors import PromptTooLongError, RequestError
from nanovllm.outputs import RequestOutput
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
        self.num_dropped = 0  # messages that the last question left no room for
        self._llm = llm
        if system is not None:
            self.instruct(system)

    @property
    def system(self) -> str | None:
        is_first = bool(self.messages) and self.messages[0]["role"] == "system"
        return self.messages[0]["content"] if is_first else None

    def instruct(self, system: str) -> None:
        """Change the instructions, as if they had been there from the start."""
        self.messages[: self.system is not None] = [_message("system", system)]

    def reset(self) -> None:
        """Forget everything but the instructions."""
        self.messages = self.messages[: self.system is not None]

    def ask(self, question: str, show: Callable[[str], None]) -> RequestOutput:
        """Stream an answer to `show`.

        The oldest turns are dropped when the context has no room for them. An interrupted answer
        is remembered as far as it came; a question without any answer is forgotten.
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

    def retry(self, show: Callable[[str], None]) -> RequestOutput:
        """Answer the last question again; the last answer stays if there is no other."""
        before = self.messages
        if [message["role"] for message in before[-2:]] != ["user", "assistant"]:
            raise RequestError("there is no answer to try again")
        self.messages = shorter = before[:-2]
        try:
            return self.ask(before[-2]["content"], show)
        finally:
            if self.messages is shorter:
                self.messages = before

    def _answer(self, messages: list[dict[str, Any]], show: Callable[[str], None]) -> RequestOutput:
        [prompt] = self._llm.apply_chat_template([messages])
        if not self._has_room(prompt) and _without_oldest_turn(messages) is not None:
            raise PromptTooLongError("the context has no room for an answer")
        answer, output = "", None
        pieces = self._llm.stream([prompt], self.params)
        try:
            with contextlib.closing(pieces):
                for piece in self.stats.count(pieces):
                    answer += piece.text
                    show(piece.text)
                    output = piece.output
        finally:
            if answer or output is not None:
                self.messages = [*messages, _message("assistant", answer)]
        assert output is not None, "the last piece of a stream has an output"
        return output

    def _has_room(self, prompt: Sequence[Any]) -> bool:
        """Whether an answer of some length fits behind the prompt; a server checks that itself."""
        if isinstance(self._llm, RemoteLLM):
            return True
        max_len = self._llm.engine.core.max_len
        return len(prompt) + min(self.params.max_new_tokens, max_len // 4) <= max_len


def _without_oldest_turn(messages: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
    """Drop the user's first message and what follows it up to the next; None if none does."""
    users = [i for i, message in enumerate(messages) if message["role"] == "user"]
    return None if len(users) < 2 else messages[: users[0]] + messages[users[1] :]


def _message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}
