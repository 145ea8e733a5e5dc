"""Tiny random Qwen3.5 models with vision towers, and what transformers generates from images."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForImageTextToText,
    PreTrainedTokenizerFast,
    Qwen3_5Config,
    Qwen3_5MoeConfig,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tests.checkpoints import DELTA_NET, EXPERTS, MIN_GAP, SIZES, make_checkpoint

IMAGE, START, END = 150, 152, 153  # ids of the placeholder, and of the tokens around it
LARGEST_ID = 140
ROPE = {
    "rope_type": "default",
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.75,
    "mrope_section": [3, 2, 1],
    "mrope_interleaved": True,
}
TEXT = {**SIZES, **DELTA_NET, "num_hidden_layers": 4, "full_attention_interval": 2}
VISION = {
    "depth": 2,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": SIZES["hidden_size"],
    "num_position_embeddings": 16,
    "patch_size": 4,
    "initializer_range": 0.25,
}
TOKENS = {
    "image_token_id": IMAGE,
    "video_token_id": 151,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
}
CONFIGS: dict[str, Any] = {
    "dense": Qwen3_5Config(
        text_config={**TEXT, "rope_parameters": ROPE}, vision_config=VISION, **TOKENS
    ),
    "moe": Qwen3_5MoeConfig(
        text_config={
            **TEXT,
            **EXPERTS,
            "num_experts": 6,
            "shared_expert_intermediate_size": 32,
            "rope_parameters": ROPE,
        },
        vision_config=VISION,
        **TOKENS,
    ),
}
PROCESSOR = {
    "size": {"shortest_edge": 4 * 64, "longest_edge": 24 * 64},  # 4 to 24 tokens
    "patch_size": 4,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.4, 0.3],
    "image_std": [0.5, 0.6, 0.7],
}

Prompt = list[Any]  # token ids and PIL images


@dataclass(frozen=True)
class TinyVision:
    path: Path
    model: Any  # the transformers model

    def generate(self, prompt: Prompt, max_tokens: int, **options: Any) -> list[int]:
        """Return transformers' greedy tokens; assert that each leads by a clear gap."""
        images = tuple(_Key(each) for each in prompt if isinstance(each, Image.Image))
        ids = tuple(START if isinstance(each, Image.Image) else each for each in prompt)
        where = tuple(i for i, each in enumerate(prompt) if isinstance(each, Image.Image))
        return list(_generate(self.model, ids, where, images, max_tokens, **options))


@dataclass(frozen=True)
class _Key:
    """An image, compared by its pixels."""

    image: Image.Image

    def __hash__(self) -> int:
        return hash(self.image.tobytes())


@cache
def _generate(
    model: Any,
    ids: tuple[int, ...],
    where: tuple[int, ...],
    images: Sequence[_Key],
    num: int,
    **options: Any,
) -> tuple[int, ...]:
    inputs: dict[str, Any] = {}
    token_ids = list(ids)
    if images:
        inputs = dict(processor()(images=[each.image for each in images], return_tensors="pt"))
        counts = [grid.prod().item() // 4 for grid in inputs["image_grid_thw"]]
        for index, count in reversed(list(zip(where, counts, strict=True))):
            token_ids[index : index + 1] = [START, *[IMAGE] * count, END]
        inputs["mm_token_type_ids"] = (torch.tensor([token_ids]) == IMAGE).int()
    with torch.inference_mode():
        output = model.generate(
            torch.tensor([token_ids]),
            attention_mask=torch.ones(1, len(token_ids), dtype=torch.long),
            max_new_tokens=num,
            do_sample=False,
            output_scores=True,
            return_dict_in_generate=True,
            **inputs,
            **options,
        )
    top2 = torch.cat(output.scores).topk(2).values
    gap = (top2[:, 0] - top2[:, 1]).min().item()
    assert gap > MIN_GAP, f"top-2 gap {gap:.1e}: choose another seed"
    return tuple(output.sequences[0, len(token_ids) :].tolist())


def processor() -> Any:
    return Qwen2VLImageProcessorPil(**json.loads(json.dumps(PROCESSOR)))


@cache
def tiny_vision(root: Path, name: str) -> TinyVision:
    path = root / f"vision-{name}"
    model = make_checkpoint(path, CONFIGS[name], auto_class=AutoModelForImageTextToText).model
    (path / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return TinyVision(path, model)


TEMPLATE = """\
{%- for message in messages %}<{{ message.role }}>
{%- if message.content is string %}{{ message.content }}
{%- else %}{% for part in message.content %}
{%- if part.type == "image" %}<|vision_start|><|image_pad|><|vision_end|>
{%- else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}
{%- if add_generation_prompt %}<assistant>{% endif %}"""


def with_chat(source: Path, target: Path) -> Path:
    """Copy a checkpoint, and add a tokenizer of characters and a chat template for images."""
    shutil.copytree(source, target)
    texts = ["<pad>", "<eos>", *map(chr, range(33, 127)), "Ġ", "Ċ"]
    texts += [f"<unused{i}>" for i in range(len(texts), IMAGE)]
    special = ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]
    vocabulary = {text: i for i, text in enumerate([*texts, *special])}
    backend = Tokenizer(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="<eos>",
        additional_special_tokens=special,
        chat_template=TEMPLATE,
    )
    tokenizer.save_pretrained(target)
    return target


def noise(seed: int, width: int, height: int) -> Image.Image:
    pixels = random.Random(seed).randbytes(3 * width * height)
    return Image.frombytes("RGB", (width, height), pixels)


def as_input(prompt: Prompt, **others: Any) -> dict[str, Any]:
    """Return a prompt as `LLM.generate` takes it."""
    ids: list[int] = []
    images = []
    for each in prompt:
        if isinstance(each, Image.Image):
            images.append(each)
            ids += [START, IMAGE, END]
        else:
            ids.append(each)
    data = {"multi_modal_data": {"image": images}} if images else {}
    return {"prompt_token_ids": ids, **data, **others}
