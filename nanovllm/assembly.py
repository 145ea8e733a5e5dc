"""Assemble an engine: find the model, choose device and executor, and create the engine core.

Only this file does so. It imports the parts on demand, so that a process without an engine core
needs no torch.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from nanovllm.checkpoint.find import Checkpoint, eos_token_ids, find_checkpoint
from nanovllm.checkpoint.tokenizer import load_tokenizer
from nanovllm.config import DEFAULT_LEN, WHOLE_CONTEXT, EngineConfig, ModelConfig
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.core import EngineCore
from nanovllm.engine.engine_options import TEXT_ONLY
from nanovllm.engine.executor import Executor, ExecutorInfo
from nanovllm.engine.feature import Feature
from nanovllm.engine.grammar import GrammarEngine
from nanovllm.engine.images import ImageReader, NoImages
from nanovllm.engine.input_processor import InputProcessor, Vocabulary
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.scoring import check_bidirectional
from nanovllm.engine.step import Pooling
from nanovllm.errors import ConfigError, GrammarError, NanovllmError, UnsupportedModelError
from nanovllm.validation import has_folder

if TYPE_CHECKING:
    from nanovllm.parallel.worker_main import WorkerTask
    from nanovllm.vision.image_settings import ImageSettings
    from nanovllm.worker.device_interface import Device
    from nanovllm.worker.worker import WorkerPart

logger = logging.getLogger(__name__)

PILLOW = "pip install 'nanovllm[vision]'"


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """The checkpoint and configuration of a model, and the engine options it runs with."""

    config: EngineConfig
    model_config: ModelConfig
    checkpoint: Checkpoint

    @property
    def default_pooling(self) -> Pooling | None:
        """The pooling of a model that only embeds; None for a model that generates."""
        if self.checkpoint.embedding is not None:
            return self.checkpoint.embedding.pooling
        return None if self.model_config.is_causal else "mean"

    def load_vocabulary(self) -> Vocabulary:
        tokenizer = None if self.config.skip_tokenizer_init else load_tokenizer(self.checkpoint)
        eos_ids = eos_token_ids(self.checkpoint)
        if not eos_ids and tokenizer is not None and tokenizer.eos_token_id is not None:
            eos_ids = (tokenizer.eos_token_id,)
        vocab_size = self.model_config.vocab_size
        return Vocabulary(tokenizer, frozenset(i for i in eos_ids if 0 <= i < vocab_size))


@dataclass(frozen=True, slots=True)
class StartedCore:
    core: EngineCore
    info: ExecutorInfo


def engine_config(model: object, options: Mapping[str, Any]) -> EngineConfig:
    """Create an EngineConfig from keyword arguments, which may include vLLM's options."""
    if not options.keys() <= EngineConfig.__dataclass_fields__.keys():
        from nanovllm.engine.engine_options import drop_vllm_options

        options = drop_vllm_options(options)
    return EngineConfig(str(model), **options)


def resolve_model(config: EngineConfig) -> ResolvedModel:
    """Find the model, and check that it can run here before its weights are downloaded."""
    from nanovllm.models.registry import read_config_for
    from nanovllm.worker.check_model import check_model

    device = _check_device(config)

    def check(found: Mapping[str, Any]) -> None:
        check_features(config, read_config_for(found, config.model_impl))
        check_model(config, device, found)

    checkpoint = find_checkpoint(
        config.model,
        revision=config.revision,
        need_weights=config.load_format != "dummy",
        need_tokenizer=not config.skip_tokenizer_init,
        quantization=config.quantization,
        check=check,
    )
    model_config = read_config_for(checkpoint.config, config.model_impl)
    if model_config.transformers_config is not None:
        logger.warning(
            "%s runs through transformers' model code, which is slower than nanovllm's own",
            model_config.architecture,
        )
    if checkpoint.embedding is not None:  # the LM head is not used, and may be missing
        model_config = replace(model_config, tie_word_embeddings=True)
    limit = model_config.max_position_embeddings
    config = _clamp_model_len(config, limit, f"the model's {limit}")
    if not model_config.is_causal:  # each prompt must run in one step
        check_bidirectional(config.attention_backend)
        most = config.max_num_batched_tokens
        config = _clamp_model_len(config, most, f"max_num_batched_tokens={most}")
        config = replace(config, attention_backend="sdpa", enable_prefix_caching=False)
    if config.max_images and not _has_pillow() and read_image_settings(model_config, checkpoint):
        logger.warning("This model runs without images, which need Pillow: %s", PILLOW)
        config = replace(config, limit_mm_per_prompt={"image": 0})  # no process loads the tower
    return ResolvedModel(config, model_config, checkpoint)


def _clamp_model_len(config: EngineConfig, limit: int, reason: str) -> EngineConfig:
    if config.max_model_len <= limit:
        return config
    if config.max_model_len not in (WHOLE_CONTEXT, DEFAULT_LEN):
        logger.warning("max_model_len=%d is clamped to %s", config.max_model_len, reason)
    return replace(config, max_model_len=limit)


def create_input_processor(resolved: ResolvedModel, is_remote: bool = False) -> InputProcessor:
    """Create the input processor; `is_remote` means that the engine core is in another process."""
    config, vocab_size = resolved.config, resolved.model_config.vocab_size
    if config.data_parallel_size > 1 and not is_remote:
        raise ConfigError(
            "data_parallel_size is supported by AsyncLLM, `nanovllm serve` and `batch`, not by LLM"
        )
    has_workers = is_remote or config.tensor_parallel_size > 1
    vocabulary = resolved.load_vocabulary()
    create = partial(create_grammars, vocab_size, lambda: vocabulary)
    return InputProcessor(
        vocabulary,
        vocab_size,
        config.seed,
        has_workers=has_workers,
        create_grammars=create,
        default_pooling=resolved.default_pooling,
        image_reader=create_image_reader(resolved),
    )


def create_grammars(vocab_size: int, load: Callable[[], Vocabulary]) -> GrammarEngine:
    """Create the grammar engine, which calls `load` when it first needs the tokenizer."""
    require_feature("grammar", "structured output", GrammarError)
    from nanovllm.features.grammar.guidance import GuidanceEngine

    return GuidanceEngine(load, vocab_size)


def start_core(resolved: ResolvedModel, get_grammars: Callable[[], GrammarEngine]) -> StartedCore:
    """Load the model and create its engine core; `get_grammars` always returns the same engine."""
    config = resolved.config
    executor = create_executor(config, resolved.model_config, resolved.checkpoint)
    info = executor.start()
    try:
        sizes = info.num_blocks, config.kvcache_block_size
        blocks = BlockManager(*sizes, config.enable_prefix_caching, info.windows)
        num_slots = config.max_num_seqs if info.states is None else info.states.num_slots
        scheduler = Scheduler(
            blocks,
            num_slots,
            config.max_num_batched_tokens,
            create_features(config, info, blocks, get_grammars),
            allow_chunks=resolved.model_config.is_causal,
        )
        depth = info.depth if config.depth is None else config.depth
        core = EngineCore(scheduler, executor, depth, config.max_model_len)
        # A full garbage collection takes 60 ms, as it visits every imported module. After this
        # one, the next runs only once the number of long-lived objects has grown by a quarter.
        gc.collect()
    except BaseException:  # after Ctrl-C in a REPL, the traceback would keep the workers alive
        executor.close()
        raise
    if core.max_len < config.max_model_len:
        logger.warning(
            "The KV cache holds %d tokens, fewer than max_model_len=%d; sequences end at that "
            "length",
            core.max_len,
            config.max_model_len,
        )
    return StartedCore(core, info)


def check_features(config: EngineConfig, model_config: ModelConfig) -> None:
    """Refuse options and models whose feature is missing: each one's folder may be deleted."""
    if config.speculative is not None:
        require_feature("speculation", "speculative_config", ConfigError)
    if config.target_inter_token_ms is not None:
        require_feature("latency", "target_inter_token_ms", ConfigError)
    if model_config.recurrent is not None:
        require_feature("states", model_config.architecture, UnsupportedModelError)


def create_features(
    config: EngineConfig,
    info: ExecutorInfo,
    blocks: BlockManager,
    get_grammars: Callable[[], GrammarEngine],
) -> list[Feature]:
    """Create what the options and the model add to scheduling; the order does not matter."""
    features: list[Feature] = []
    num_allowed = None
    if info.states is not None:
        from nanovllm.features.states.state_pool import StatePool

        features.append(StatePool(info.states, blocks))
    if config.target_inter_token_ms is not None:
        from nanovllm.features.latency.prompt_budget import MIN_PROMPT_TOKENS, PromptBudget

        least = MIN_PROMPT_TOKENS[info.device]
        features.append(PromptBudget(config.target_inter_token_ms / 1000, least))
    if _has_feature("grammar"):
        from nanovllm.features.grammar.grammar_feature import GrammarFeature

        grammars = GrammarFeature(get_grammars)
        features.append(grammars)
        num_allowed = grammars.num_allowed
    if config.speculative is not None:
        from nanovllm.features.speculation.drafter import create_drafter

        features.append(create_drafter(config.speculative, num_allowed))
    return features


def create_parts(
    config: EngineConfig, model_config: ModelConfig, checkpoint: Checkpoint
) -> list[WorkerPart]:
    """Create what the options and the model add to a worker."""
    parts: list[WorkerPart] = []
    if config.speculative is not None and config.speculative.model is not None:
        from nanovllm.features.speculation.draft_model import DraftModel

        parts.append(DraftModel(config.speculative.model))
    settings = read_image_settings(model_config, checkpoint) if config.max_images else None
    if settings is not None:
        from nanovllm.vision.image_inputs import ImageInputs

        parts.append(ImageInputs(settings))
    return parts


def create_image_reader(resolved: ResolvedModel) -> ImageReader:
    """Create what reads the images of prompts, or what refuses them and says why."""
    settings = read_image_settings(resolved.model_config, resolved.checkpoint)
    if not _has_vision():
        return NoImages("nanovllm/vision, which reads images, is missing")
    if settings is None:
        return NoImages(_why_no_settings(resolved))
    if not _has_pillow():
        return NoImages(f"images need Pillow: {PILLOW}")
    if not resolved.config.max_images:
        return NoImages("limit_mm_per_prompt rules out images")
    from nanovllm.vision.pillow_reader import PillowReader

    config = resolved.config
    return PillowReader(settings, config.max_images, config.max_model_len)


def _why_no_settings(resolved: ResolvedModel) -> str:
    if _may_have_tower(resolved.model_config, resolved.checkpoint):
        from nanovllm.vision.image_settings import PROCESSOR_FILES, lacks_processor

        if lacks_processor(resolved.checkpoint):
            return f"this copy of the model has no {PROCESSOR_FILES[0]}; fetch the model again"
    return TEXT_ONLY


def read_image_settings(model_config: ModelConfig, checkpoint: Checkpoint) -> ImageSettings | None:
    """Return how a model sees images; None if it does not, or not here."""
    if not _may_have_tower(model_config, checkpoint):
        return None
    from nanovllm.vision import image_settings

    return image_settings.read_image_settings(checkpoint)


def _may_have_tower(model_config: ModelConfig, checkpoint: Checkpoint) -> bool:
    is_ours = model_config.transformers_config is None
    return is_ours and _has_vision() and "image_token_id" in checkpoint.config


def _has_vision() -> bool:
    return has_folder("nanovllm.vision")


def _has_pillow() -> bool:
    return has_folder("PIL")


def require_feature(feature: str, asked: str, error: type[NanovllmError]) -> None:
    """Raise an error if the folder of a feature that is asked for is missing."""
    if not _has_feature(feature):
        raise error(f"{asked} needs nanovllm/features/{feature}, which is missing")


def _has_feature(name: str) -> bool:
    return has_folder(f"nanovllm.features.{name}")


def create_executor(
    config: EngineConfig, model_config: ModelConfig, checkpoint: Checkpoint
) -> Executor:
    """Create a worker in this process, or workers in other processes or on a Ray cluster."""
    if _has_rank_processes(config):
        from nanovllm.parallel.multiproc_executor import MultiprocExecutor

        return MultiprocExecutor(config, model_config, checkpoint, build_worker)
    from nanovllm.worker.worker import Worker

    device = _create_device(config)
    parts = create_parts(config, model_config, checkpoint)
    return Worker(config, model_config, checkpoint, device, parts)


def build_worker(task: WorkerTask, rank: int) -> Executor:
    """Build the worker of one rank, in its process: its device, process group and model shard."""
    from nanovllm.devices.choose import create_device
    from nanovllm.parallel.worker_main import join_group
    from nanovllm.worker.worker import Worker

    device = create_device(task.config, join_group(task, rank))
    parts = create_parts(task.config, task.model_config, task.checkpoint)
    return Worker(task.config, task.model_config, task.checkpoint, device, parts)


def _check_device(config: EngineConfig) -> Device | None:
    """Return the device to check a model against; None if only rank processes may use one."""
    if not _has_devices() or not _has_rank_processes(config):
        return _create_device(config)
    from nanovllm.devices.ranks import check_devices

    return check_devices(config)


def _has_rank_processes(config: EngineConfig) -> bool:
    return config.distributed_executor_backend == "ray" or config.tensor_parallel_size > 1


def _create_device(config: EngineConfig) -> Device:
    if not _has_devices():
        from nanovllm.worker.torch_device import TorchDevice

        return TorchDevice(config)
    from nanovllm.devices.choose import create_device

    return create_device(config)


def _has_devices() -> bool:
    """Return whether `devices/` with the kernels is installed; otherwise plain torch is used."""
    return has_folder("nanovllm.devices")
