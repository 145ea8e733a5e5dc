"""Check the fields of `quantization_config`, and the tensors of a quantized weight."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nanovllm.errors import CheckpointError, UnsupportedQuantisationError

if TYPE_CHECKING:
    from nanovllm.checkpoint.stored_tensors import StoredTensor

WHERE = "quantization_config in config.json"
BITS = (4, 8)  # integer widths that may be packed into 32-bit words
FLOATS = ("float64", "float32", "float16", "bfloat16")


def choose(stored: Mapping[str, Any], name: str, default: object, *supported: object) -> Any:
    """Return the value of a field, which must be one of `supported`."""
    value = stored.get(name)
    value = default if value is None else value
    if not any(type(value) is type(each) and value == each for each in supported):
        raise unsupported(f"{name} {value!r:.80}", ", ".join(map(str, supported)))
    return value


def read_group_size(stored: Mapping[str, Any]) -> int:
    size = stored.get("group_size")
    if type(size) is not int or not (size == -1 or (8 <= size < 2**31 and size % 8 == 0)):
        raise unsupported(f"group_size {size!r:.80}", "multiples of 8, and -1")
    return size


def read_names(names: Any) -> tuple[str, ...]:
    if not isinstance(names or [], list | tuple):
        raise unsupported(f"{names!r:.80} in place of a list of modules")
    for name in names or ():
        re.compile(name.removeprefix("re:") if name.startswith("re:") else "")
    # In a multimodal model, the text model's modules have a prefix that our names lack.
    return tuple(name.replace("language_model.", "") for name in names or ())


def unsupported(what: str, supported: str = "") -> UnsupportedQuantisationError:
    instead = f" (supported: {supported})" if supported else ""
    return UnsupportedQuantisationError(f"{WHERE}: {what} is not supported{instead}")


def check_matrix(tensor: StoredTensor, dtype: str) -> tuple[int, int]:
    """Check that a tensor is a matrix of type `dtype`, and return its shape."""
    sizes = (*tensor.shape, 1, 1)
    check_part(tensor, sizes[:2], dtype)
    return sizes[0], sizes[1]


def check_part(tensor: StoredTensor, shape: tuple[int, ...], *dtypes: str) -> None:
    if tensor.shape != shape or tensor.dtype_name not in dtypes:
        raise CheckpointError(
            f"{tensor.file}: tensor {tensor.name!r} has shape {list(tensor.shape)} of "
            f"{tensor.dtype_name}, expected {list(shape)} of {' or '.join(dtypes)}"
        )
