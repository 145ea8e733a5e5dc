"""Decoders that run through transformers' model code equal transformers' own `generate`."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import random
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Mxfp4Config
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from nanovllm import LLM, AsyncLLM, SamplingParams
from nanovllm.errors import CheckpointError, ConfigError, UnsupportedModelError
from nanovllm.models.registry import read_config_for
from tests.byte_tokenizer import with_tokenizer
from tests.checkpoints import TinyCheckpoint, make_checkpoint
from tests.models.transformers_families import FAMILIES, SEEDS, make_config

pytestmark = pytest.mark.usefixtures("one_thread")
# Windows, experts, learned positions, merged qkv, scaled logits, and heads that differ by layer.
FAST = ("cohere2", "gemma4_text", "gpt2", "gpt_neox", "olmoe", "opt", "stablelm")
MAX_TOKENS = 12
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
# Small enough for chunked prefill and preemption.
SMALL = {
    **{"kvcache_block_size": 16, "num_kvcache_blocks": 6, "max_num_batched_tokens": 9},
    **{"max_num_seqs": 4, "max_model_len": 128, "skip_tokenizer_init": True, "dtype": "float32"},
}


def make_prompts() -> list[list[int]]:
    rng = random.Random(1)
    shared, other = ([rng.randrange(160) for _ in range(n)] for n in (40, 17))
    return [shared, [*shared[:33], 7, 9], other, [5, 6, 7]]


def make_tiny(path: Path, model_type: str, **changes: Any) -> TinyCheckpoint:
    return make_checkpoint(path, make_config(model_type, **changes), SEEDS.get(model_type, 0))


@pytest.mark.parametrize(
    "model_type",
    [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES],
)
def test_equals_generate(tmp_path: Path, model_type: str) -> None:
    """In a small engine that chunks prompts, preempts sequences and reuses prefixes."""
    checkpoint, prompts = make_tiny(tmp_path, model_type), make_prompts()
    # Families of this list may become ours: compare transformers' model code also then.
    with LLM(str(tmp_path), model_impl="transformers", **SMALL) as llm:
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        tokens = [output.token_ids for output in outputs]
        checkpoint.assert_greedy(prompts, tokens)
        assert llm.engine.core.scheduler.num_preemptions > 0
        outputs = llm.generate(prompts, replace(GREEDY, n=2), use_tqdm=False)
        each = [[sample.token_ids for sample in output.outputs] for output in outputs]
        assert each == [[one, one] for one in tokens]
        assert sum(output.num_cached_tokens for output in outputs) > 32
        llm.engine.core.scheduler.check()


def test_a_padding_token_does_not_matter(tmp_path: Path) -> None:
    checkpoint = make_tiny(tmp_path, "gpt2", pad_token_id=0)
    prompts = [[0, *prompt, 0] for prompt in make_prompts()]
    want = [checkpoint.generate(prompt, MAX_TOKENS) for prompt in prompts]
    with LLM(str(tmp_path), **SMALL) as llm:
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [output.token_ids for output in outputs] == want


@pytest.mark.parametrize("options", [{"kv_cache_dtype": "fp8"}, {"depth": 1}])
def test_cached_equals_uncached(tmp_path: Path, options: dict[str, Any]) -> None:
    make_tiny(tmp_path, "gemma4_text")
    prompts = make_prompts()
    with LLM(str(tmp_path), **{**SMALL, "num_kvcache_blocks": 64, **options}) as llm:
        first, again = (llm.generate(prompts, GREEDY, use_tqdm=False) for _ in range(2))
    assert [output.token_ids for output in first] == [output.token_ids for output in again]
    assert sum(output.num_cached_tokens for output in again) > 0


def test_drafts_do_not_change_tokens(tmp_path: Path) -> None:
    checkpoint, prompts = make_tiny(tmp_path, "stablelm"), make_prompts()
    config = {"method": "ngram", "num_speculative_tokens": 3}
    with LLM(str(tmp_path), **{**SMALL, "speculative_config": config}) as llm:
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    want = [checkpoint.generate(prompt, MAX_TOKENS) for prompt in prompts]
    assert [output.token_ids for output in outputs] == want


def test_logprobs_and_embeddings(tmp_path: Path) -> None:
    """Hidden states are those after the final norm, and logits are scaled as in training."""
    checkpoint, [prompt, *_] = make_tiny(tmp_path, "cohere"), make_prompts()
    params = replace(GREEDY, logprobs=1, prompt_logprobs=1)
    with LLM(str(tmp_path), **SMALL) as llm:
        [output] = llm.generate([prompt], params, use_tqdm=False)
        [embedded] = llm.embed([prompt], normalize=False, use_tqdm=False)
    ids = [*prompt, *output.token_ids]
    want = checkpoint.logprobs(ids)
    assert output.prompt_logprobs is not None
    assert output.outputs[0].logprobs is not None
    found = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
    for position, (token, each) in enumerate(zip(ids[1:], found, strict=True)):
        assert each is not None
        assert each[token].logprob == pytest.approx(want[position, token].item(), abs=1e-4)
    with torch.inference_mode():
        states = checkpoint.model.model(torch.tensor([prompt])).last_hidden_state[0, -1]
    assert embedded.embedding == pytest.approx(states.tolist(), abs=1e-4)


def test_a_family_of_ours_runs_both_ways(tiny: Any, caplog: pytest.LogCaptureFixture) -> None:
    checkpoint, prompts = tiny("qwen3"), make_prompts()
    tokens, texts = [], []
    for name in ("auto", "nanovllm", "transformers"):
        caplog.clear()
        with (
            caplog.at_level(logging.INFO),
            LLM(str(checkpoint.path), model_impl=name, **SMALL) as llm,
        ):
            outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        tokens.append([output.token_ids for output in outputs])
        texts.append(sum("slower" in record.message for record in caplog.records))
    assert tokens[0] == tokens[1] == tokens[2]
    assert texts == [0, 0, 1]


def test_the_text_model_of_gemma_4(tmp_path: Path) -> None:
    """Published models of this family also read images and sound, and share keys and values."""
    layers = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
    text = make_config("gemma4_text", **layers, num_kv_shared_layers=2, pad_token_id=0)
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 16}
    vision |= {"num_attention_heads": 2, "num_key_value_heads": 2}
    config = CONFIG_MAPPING["gemma4"](
        text_config=text.to_dict(), vision_config=vision, tie_word_embeddings=False
    )
    checkpoint = make_checkpoint(tmp_path, config)
    assert any("vision_tower" in name for name, _ in checkpoint.model.named_parameters())
    want = [checkpoint.generate(prompt, MAX_TOKENS) for prompt in make_prompts()]
    with LLM(str(tmp_path), **SMALL) as llm:
        assert llm.engine.model_config.architecture == "Gemma4ForCausalLM"
        shared = [layer.cache_layer for layer in llm.engine.model_config.layers]
        assert shared == [None, None, 0, 1]
        outputs = llm.generate(make_prompts(), GREEDY, use_tqdm=False)
    assert [output.token_ids for output in outputs] == want


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_kvcache_blocks": 12, "max_num_batched_tokens": 40},
        {"kv_cache_dtype": "fp8"},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    ],
    ids=["plain", "small", "fp8", "drafts"],
)
@pytest.mark.parametrize(("is_full_small", "num_groups"), [(True, 5), (False, 2)])
def test_layers_of_two_sizes(
    tmp_path: Path, options: dict[str, Any], is_full_small: bool, num_groups: int
) -> None:
    """A row of the KV cache holds one layer, or two with full attention, or two with a window.

    In the first case, a row is a group, and in the second, a group has two rows.
    """
    layers = {"num_hidden_layers": 6, "num_key_value_heads": 4, "attention_k_eq_v": is_full_small}
    types = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    checkpoint = make_tiny(tmp_path, "gemma4_text", **layers, layer_types=types)
    prompts = [[5] * 100, list(range(150)), *make_prompts()]
    options = {**SMALL, "max_model_len": 256, "num_kvcache_blocks": 40, **options}
    with LLM(str(tmp_path), **options) as llm:
        shapes = [
            tuple(cache.k.shape[2:]) for cache in llm.engine.core.executor.runner.eager.caches
        ]
        if "kv_cache_dtype" in options:
            assert shapes == [(4, 32)] * 6
            return
        assert shapes == [(4, 16), (4, 16), (1, 32) if is_full_small else (4, 32)] * 2
        assert len(llm.engine.core.scheduler.blocks.num_held) == num_groups
        for _ in range(2):
            outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
            want = [checkpoint.generate(prompt, MAX_TOKENS) for prompt in prompts]
            assert [output.token_ids for output in outputs] == want


def test_gpt_oss_in_mxfp4(tmp_path: Path) -> None:
    """Its experts, as published: 32 values of 4 bits in 16 bytes, and one exponent."""
    checkpoint = make_tiny(tmp_path, "gpt_oss", intermediate_size=64)
    tensors, generator = {}, torch.Generator().manual_seed(0)
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            tensors[name] = tensor
            continue
        experts, inputs, outputs = tensor.shape
        shape = experts, outputs, inputs // 32
        random = partial(torch.randint, dtype=torch.uint8, generator=generator)
        tensors[f"{name}_blocks"] = random(256, (*shape, 16))
        tensors[f"{name}_scales"] = random(122, 125, shape)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": []}
    (tmp_path / "config.json").write_text(json.dumps(config))

    options = {"quantization_config": Mxfp4Config(dequantize=True), "attn_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, **options)
    checkpoint = replace(checkpoint, model=model.float().eval())
    want = [checkpoint.generate(prompt, MAX_TOKENS) for prompt in make_prompts()]
    with LLM(str(tmp_path), **SMALL) as llm:
        outputs = llm.generate(make_prompts(), GREEDY, use_tqdm=False)
    assert [output.token_ids for output in outputs] == want


@pytest.mark.slow
def test_structured_output_in_a_process_of_its_own(tmp_path: Path) -> None:
    make_tiny(tmp_path / "plain", "gpt_neox")
    path = str(with_tokenizer(tmp_path / "plain", tmp_path / "model"))
    params = SamplingParams(
        max_tokens=20, seed=1, structured_outputs={"regex": "[a-c]{3}-[0-9]{2}"}
    )

    async def run() -> str:
        async with AsyncLLM(path, **{**SMALL, "skip_tokenizer_init": False}) as llm:
            return "".join([piece.text async for piece in llm.generate("abc", params)])

    assert re.fullmatch("[a-c]{3}-[0-9]{2}", asyncio.run(run()))


def test_dummy_weights_depend_on_the_seed(tmp_path: Path) -> None:
    make_config("stablelm", architectures=["StableLmForCausalLM"]).save_pretrained(tmp_path)

    def run(seed: int) -> list[list[int]]:
        with LLM(str(tmp_path), load_format="dummy", seed=seed, **SMALL) as llm:
            outputs = llm.generate(make_prompts(), GREEDY, use_tqdm=False)
        return [output.token_ids for output in outputs]

    assert run(1) == run(1) != run(2)


def config_of(model_type: str, **fields: Any) -> dict[str, Any]:
    config = CONFIG_MAPPING[model_type](**fields)
    with torch.device("meta"):
        architecture = type(AutoModelForCausalLM.from_config(config)).__name__
    return {**config.to_dict(), "architectures": [architecture]}


FEW = {"num_hidden_layers": 2}
REFUSED = {
    "mamba": (FEW, "recurrent state"),
    "falcon_h1": (FEW, "recurrent state"),
    "lfm2": ({**FEW, "layer_types": ["conv", "full_attention"]}, "layers of type conv"),
    "deepseek_v3": ({**FEW, "n_routed_experts": 8}, r"latent attention \(MLA\)"),
    "minicpm3": (FEW, r"latent attention \(MLA\)"),
    "bert": (FEW, "is not causal: it is an encoder"),
    "bart": ({"decoder_layers": 2, "encoder_layers": 2}, "instead of taking position_ids"),
    "bloom": ({"n_layer": 2}, "does not use transformers' AttentionInterface"),
    "falcon": (FEW, "does not use transformers' AttentionInterface"),
    "diffllama": (FEW, "several attentions"),
    "doge": (FEW, "a mask or a bias of its own"),
    "roberta": ({**FEW, "is_decoder": True}, r"positions start at pad_token_id \+ 1"),
    "xlm-roberta": ({**FEW, "is_decoder": True}, r"positions start at pad_token_id \+ 1"),
    "phi": ({**FEW, "rope_parameters": {"rope_theta": 0.0}}, "rope_theta must be above 0, got 0"),
    "jetmoe": (FEW, "does not run without data"),
}


@pytest.mark.parametrize("model_type", list(REFUSED))
def test_refusals_name_the_reason(model_type: str) -> None:
    fields, reason = REFUSED[model_type]
    config = config_of(model_type, **fields)
    [name] = config["architectures"]
    with pytest.raises(
        UnsupportedModelError, match=f"'{name}' is not supported; .*'{name}'.*{reason}"
    ):
        read_config_for(config, "auto")
    with pytest.raises(
        UnsupportedModelError, match=f"'{name}' is not supported; supported: [^;]*$"
    ):
        read_config_for(config, "nanovllm")


@pytest.mark.parametrize("model_type", ["mamba2", "falcon_h1", "bamba", "granitemoehybrid"])
def test_a_config_with_infinity_is_refused_for_its_states(tmp_path: Path, model_type: str) -> None:
    config = config_of(model_type, **FEW)
    CONFIG_MAPPING[model_type].from_dict(config).save_pretrained(tmp_path)
    assert '"__float__": "Infinity"' in (tmp_path / "config.json").read_text()
    with pytest.raises(UnsupportedModelError, match="recurrent state"):
        LLM(str(tmp_path), load_format="dummy", skip_tokenizer_init=True)


def test_other_models_are_refused() -> None:
    for model_type, name in (("t5", "T5"), ("bart", "Bart")):
        config = CONFIG_MAPPING[model_type]().to_dict()
        names = [f"{name}ForConditionalGeneration"]
        with pytest.raises(UnsupportedModelError, match="encoder and cross attention"):
            read_config_for({**config, "architectures": names}, "auto")
    bert = {**CONFIG_MAPPING["bert"]().to_dict(), "architectures": ["BertForMaskedLM"]}
    with pytest.raises(UnsupportedModelError, match="no decoder-only language model"):
        read_config_for(bert, "transformers")
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    phi = config_of("phi", **FEW, rope_parameters=dynamic)
    with pytest.raises(UnsupportedModelError, match="'dynamic' depends on the other rows"):
        read_config_for(phi, "auto")
    quantized = {**config_of("phi", **FEW), "quantization_config": {"quant_method": "awq"}}
    with pytest.raises(UnsupportedModelError, match="quantized"):
        read_config_for(quantized, "auto")
    with pytest.raises(CheckpointError, match="invalid value"):
        read_config_for({**config_of("phi", **FEW), "hidden_size": "64"}, "auto")
    with pytest.raises(CheckpointError, match="layer_norm_eps must be a number, got NaN"):
        read_config_for({**config_of("phi", **FEW), "layer_norm_eps": math.nan}, "auto")


def test_unsupported_options_and_weights(tmp_path: Path) -> None:
    checkpoint = make_tiny(tmp_path, "stablelm")
    for option in ({"tensor_parallel_size": 2}, {"quantization": "fp8"}):
        with pytest.raises(ConfigError, match="StableLmForCausalLM, which runs through"):
            LLM(str(tmp_path), **{**SMALL, **option})
    del checkpoint.model.lm_head
    checkpoint.model.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"missing keys: lm_head\.weight"):
        LLM(str(tmp_path), **SMALL)
