"""Open a GGUF file: a parsed header, and tensor data that stays mapped on disk until it is read."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from nanovllm.errors import CheckpointError, UnsupportedModelError

if TYPE_CHECKING:
    from gguf import GGUFReader, GGUFValueType


def open_gguf(path: Path) -> GGUFReader:
    """Return the `gguf` package's reader over one whole file."""
    try:
        reader = _reader_class()(path)
    except (OSError, ValueError, LookupError, OverflowError, struct.error) as error:
        raise CheckpointError(
            f"{path} cannot be read as GGUF ({error}); it may be truncated, fetch it again"
        ) from error
    if reader.byte_order == "S":
        raise UnsupportedModelError(f"{path} has the other byte order; convert it on this machine")
    if (parts := field(reader, "split.count", 1)) > 1:
        raise UnsupportedModelError(
            f"{path} is one of {parts} parts; join them with `llama-gguf-split --merge`"
        )
    return reader


def field(reader: GGUFReader, key: str, default: Any = None) -> Any:
    """Return a metadata value as plain Python, or the default when the key is absent."""
    found = reader.get_field(key)
    return default if found is None else found.contents()


def release_pages(reader: GGUFReader) -> None:
    """Give back what was read: while it stays mapped it counts as memory of this process."""
    mapped = reader.data.base
    if isinstance(mapped, mmap.mmap) and hasattr(mapped, "madvise"):  # not on Windows
        mapped.madvise(mmap.MADV_DONTNEED)


def _reader_class() -> type[GGUFReader]:
    import gguf

    class Reader(gguf.GGUFReader):
        """Read arrays in bulk: the base class takes 20 us an item, seconds for a vocabulary."""

        def _get_field_parts(
            self, orig_offs: int, raw_type: int
        ) -> tuple[int, list[npt.NDArray[Any]], list[int], list[GGUFValueType]]:
            if raw_type != gguf.GGUFValueType.ARRAY or self.byte_order == "S":
                return super()._get_field_parts(orig_offs, raw_type)
            item_type, count = struct.unpack_from("<IQ", self.data.data, orig_offs)
            types = [gguf.GGUFValueType.ARRAY, gguf.GGUFValueType(item_type)]
            if types[1] == gguf.GGUFValueType.STRING:
                strings, end = _read_strings(self.data, orig_offs + 12, count)
                return end - orig_offs, strings, list(range(count)), types
            items = self._get(orig_offs + 12, self.gguf_scalar_to_np[types[1]], count)
            return 12 + items.nbytes, [items], [0], types

    return Reader


def _read_strings(
    data: npt.NDArray[np.uint8], offset: int, count: int
) -> tuple[list[npt.NDArray[Any]], int]:
    """Each is a length and its bytes; returns them with the offset of what follows."""
    plain, strings = data.view(np.ndarray), []  # slicing a memmap is slow
    for _ in range(count):
        (length,) = struct.unpack_from("<Q", data.data, offset)
        strings.append(plain[offset + 8 : offset + 8 + length])
        offset += 8 + length
    return strings, offset
