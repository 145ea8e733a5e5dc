"""The methods of `LLM` that reply to conversations."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

from nanovllm.engine.conversations import ChatOptions, Messages, prompts_of, template_options
from nanovllm.engine.prompts import Params
from nanovllm.outputs import RequestOutput, StreamPiece

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from nanovllm.engine.engine_thread import EngineThread


class ChatMethods:
    """`generate` and `stream` for conversations instead of prompts."""

    engine: EngineThread
    generate: Callable[..., list[RequestOutput]]
    stream: Callable[..., Generator[StreamPiece, None, None]]

    def chat(
        self,
        messages: Messages,
        sampling_params: Params = None,
        use_tqdm: bool = True,
        *,
        cache_salt: str | None = None,
        **options: Unpack[ChatOptions],
    ) -> list[RequestOutput]:
        """Reply to one conversation or a list of them, formatted with the model's chat template.

        Options are the fields of `nanovllm.engine.conversations.ChatOptions`.
        """
        prompts = self.apply_chat_template(messages, **template_options(options))
        return self.generate(prompts, sampling_params, use_tqdm, cache_salt=cache_salt)

    def stream_chat(
        self,
        messages: Messages,
        sampling_params: Params = None,
        *,
        cache_salt: str | None = None,
        **options: Unpack[ChatOptions],
    ) -> Generator[StreamPiece, None, None]:
        """Like `chat`, but yield text as it is generated, as `stream` does."""
        prompts = self.apply_chat_template(messages, **template_options(options))
        return self.stream(prompts, sampling_params, cache_salt=cache_salt)

    def apply_chat_template(self, messages: Messages, **options: Any) -> list[list[int]]:
        """Return one prompt of token ids per conversation."""
        return prompts_of(self.engine.input_processor, messages, **options)
