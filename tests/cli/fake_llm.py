"""A fake model that generates the same pieces for every prompt, immediately."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

from nanovllm.errors import RequestError
from nanovllm.outputs import RequestOutput, StreamPiece
from nanovllm.sampling_params import SamplingParams


class FakeLLM:
    """Refuses prompts with "bad"; its template refuses "odd" ones, and "broken" ones fail later."""

    def __init__(self, *texts: str, has_template: bool = True, finish_reason: str = "stop") -> None:
        self.texts = texts
        self.finish_reason = finish_reason
        self.num_closed = 0  # streams that ended or were closed early
        self.conversations: list[Any] = []  # inputs of the chat template
        self.prompts: list[Any] = []
        self.params: SamplingParams | None = None
        tokenizer = SimpleNamespace(chat_template="a template" if has_template else None)
        processor, core = SimpleNamespace(tokenizer=tokenizer), SimpleNamespace(max_len=10**6)
        self.engine = SimpleNamespace(input_processor=processor, core=core)

    def __enter__(self) -> FakeLLM:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def apply_chat_template(self, messages: list[Any]) -> list[str]:
        self.conversations = messages
        questions = [messages[-1]["content"] for messages in self.conversations]
        if any("odd" in question for question in questions):
            raise RequestError("the chat template refused the messages")
        return [f"<{question}>" for question in questions]

    def stream(
        self,
        prompts: Any,
        params: SamplingParams,
        on_refusal: Callable[[int, RequestError], None] | None = None,
    ) -> Iterator[StreamPiece]:
        self.prompts = prompts
        self.params = params
        try:
            accepted = []
            for index, prompt in enumerate(self.prompts):
                if prompt is None or "bad" in prompt:
                    error = RequestError("too long")
                    if on_refusal is None:
                        raise error
                    on_refusal(index, error)
                else:
                    accepted.append(index)
            for index in reversed(accepted):
                yield from self._pieces(index)
        finally:
            self.num_closed += 1

    def _pieces(self, index: int) -> Iterator[StreamPiece]:
        text = "".join(self.texts)
        ids = list(range(len(self.texts)))
        is_broken = "broken" in self.prompts[index]
        end = (
            ("error", 0, 0.1, 0.2, "logits are NaN")
            if is_broken
            else (self.finish_reason, 0, 0.1, 0.2)
        )
        output = RequestOutput(index, None, [1, 2], text, ids, *end)
        for number, piece in enumerate(self.texts, start=1):
            is_last = number == len(self.texts)
            yield StreamPiece(index, piece, [1], output if is_last else None, index=index)
