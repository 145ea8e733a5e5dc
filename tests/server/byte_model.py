"""A tiny random model whose tokens are bytes; its chat template knows tools and thoughts."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast, Qwen3Config

from tests.checkpoints import SIZES, make_checkpoint

SPECIAL = ("<|im_start|>", "<|im_end|>")
TEMPLATE = """\
{%- if tools %}<|im_start|>system
Write calls as <tool_call>\\n{"name": ..., "arguments": ...}\\n</tool_call>.
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""


def byte_tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=SPECIAL[1],
        additional_special_tokens=list(SPECIAL),
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def make_byte_model(folder: Path, max_len: int = 1024) -> Path:
    sizes = {**SIZES, "vocab_size": 288, "max_position_embeddings": max_len}
    make_checkpoint(folder, Qwen3Config(**sizes, head_dim=16, tie_word_embeddings=False))
    byte_tokenizer().save_pretrained(folder)
    return folder
