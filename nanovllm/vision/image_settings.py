"""Read how a checkpoint's model sees images: its tower, placeholder, and image processor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanovllm.checkpoint.find import Checkpoint
from nanovllm.checkpoint.folder_files import read_json
from nanovllm.config import ConfigJson
from nanovllm.errors import CheckpointError

TEXT_ANYWAY = 'to run the text model alone, set limit_mm_per_prompt={"image": 0}'
# Models whose tower gives embeddings only, and no features for the text model's first layers.
ARCHITECTURES = ("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration")
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")  # transformers 4, and 5


@dataclass(frozen=True, slots=True)
class ImageSettings:
    vision_config: ConfigJson  # of the tower
    placeholder_id: int
    # For each of the three axes (time, height, width), the number of rotated pairs that it turns.
    mrope_section: tuple[int, int, int]
    patch_size: int  # in pixels
    merge_size: int  # a token stands for merge_size x merge_size patches
    frames: int  # a still image is repeated this many times
    min_pixels: int  # of a resized image
    max_pixels: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    @property
    def token_size(self) -> int:
        """Width and height in pixels of what a token stands for."""
        return self.patch_size * self.merge_size


def read_image_settings(checkpoint: Checkpoint) -> ImageSettings | None:
    """Return the image settings of a checkpoint; None if its model does not support images.

    Also return None if the checkpoint lacks the settings of the image processor.
    """
    config = _tower_config(checkpoint)
    processor = None if config is None else _read_processor(checkpoint.path)
    if config is None or processor is None:
        return None
    vision = config["vision_config"]
    try:
        return _read(config, vision, processor)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"the settings for images in {checkpoint.path} are invalid ({error!r:.200}); fetch "
            f"them again, or {TEXT_ANYWAY}"
        ) from error


def lacks_processor(checkpoint: Checkpoint) -> bool:
    """Return whether only the image processor's settings are missing."""
    return _tower_config(checkpoint) is not None and _read_processor(checkpoint.path) is None


def _tower_config(checkpoint: Checkpoint) -> ConfigJson | None:
    """Return the config of a model with a tower that is supported; None for other models."""
    if checkpoint.is_gguf or not (checkpoint.path / "config.json").is_file():
        return None
    config = read_json(checkpoint.path / "config.json")
    names, vision = config.get("architectures"), config.get("vision_config")
    is_known = bool(names) and names[0] in ARCHITECTURES and isinstance(vision, Mapping)
    return config if is_known and not vision.get("deepstack_visual_indexes") else None


def _read(config: ConfigJson, vision: ConfigJson, processor: ConfigJson) -> ImageSettings:
    size = processor["size"]
    text = config["text_config"]
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    settings = ImageSettings(
        vision_config=vision,
        placeholder_id=int(config["image_token_id"]),
        mrope_section=tuple(rope.get("mrope_section") or (11, 11, 10)),
        patch_size=int(processor["patch_size"]),
        merge_size=int(processor["merge_size"]),
        frames=int(processor["temporal_patch_size"]),
        min_pixels=int(processor.get("min_pixels") or size["shortest_edge"]),
        max_pixels=int(processor.get("max_pixels") or size["longest_edge"]),
        mean=tuple(processor["image_mean"]),
        std=tuple(processor["image_std"]),
    )
    pairs = {
        "patch_size": settings.patch_size,
        "spatial_merge_size": settings.merge_size,
        "temporal_patch_size": settings.frames,
    }
    for name, value in pairs.items():
        if vision.get(name, value) != value:
            raise ValueError(f"{name} of the tower is {vision[name]}, but images have {value}")
    return settings


def _read_processor(folder: Path) -> dict[str, Any] | None:
    """Return the settings of the image processor, which transformers 5 nests in those of others."""
    for name in PROCESSOR_FILES:
        if (folder / name).is_file():
            processor = read_json(folder / name)
            nested: dict[str, Any] = processor.get("image_processor", processor)
            return nested
    return None
