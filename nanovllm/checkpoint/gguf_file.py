"""Open a GGUF file: parse its header, and memory-map its tensor data."""

from __future__ import annotations

import math
import mmap
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from nanovllm.errors import CheckpointError, NanovllmError, UnsupportedModelError

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType

DEQUANTIZED_ELEMENTS = 1 << 17  # elements per call; bounds the gguf package's temporary copies
_SENTENCEPIECE_IDS = {"unknown": 0, "bos": 1, "eos": 2}


def open_gguf(path: Path, has_lists: bool = True) -> GGUFReader:
    """Return the `gguf` package's reader for a file; raise if the file is damaged or incomplete.

    `has_lists=False` skips string lists, such as the vocabulary, and saves about ten megabytes.
    """
    try:
        with np.errstate(over="raise"):  # offsets past 2**64 would wrap around
            reader = _reader_class(has_lists)(path)
        _check_tensors(reader)
    except NanovllmError:
        raise
    except Exception as error:  # the package raises various errors for damaged files
        raise CheckpointError(
            f"{path} cannot be read as GGUF ({error!r:.200}); it may be truncated, fetch it again"
        ) from error
    if (parts := field(reader, "split.count", 1, int)) > 1:
        raise UnsupportedModelError(
            f"{path} is one of {parts} parts; join them with `llama-gguf-split --merge`"
        )
    return reader


def field(reader: GGUFReader, key: str, default: Any = None, kind: Any = object) -> Any:
    """Return a metadata value as plain Python, or the default when the key is absent."""
    entry = reader.get_field(key)
    if entry is None:
        return default
    try:
        value = entry.contents()
    except ValueError as error:
        raise CheckpointError(f"GGUF metadata {key} is not text ({error})") from error
    if not isinstance(value, kind):
        raise CheckpointError(f"GGUF metadata {key} has the wrong type: {value!r:.80}")
    return value


def list_field(reader: GGUFReader, key: str, kind: Any) -> list[Any] | None:
    """Return a list of items of type `kind`, or None when the key is absent."""
    items: list[Any] | None = field(reader, key, None, list)
    if items and not isinstance(items[0], kind):  # GGUF arrays have one item type
        raise CheckpointError(f"GGUF metadata {key} has items of the wrong type: {items[0]!r:.80}")
    return items


def special_token_id(reader: GGUFReader, role: str) -> int | None:
    """Return the token id of a role such as "bos"; SentencePiece defines some defaults."""
    is_sentencepiece = field(reader, "tokenizer.ggml.model") == "llama"
    default = _SENTENCEPIECE_IDS.get(role) if is_sentencepiece else None
    token_id: int | None = field(reader, f"tokenizer.ggml.{role}_token_id", default, int)
    return token_id


def release_pages(reader: GGUFReader) -> None:
    """Release the pages that were read: mapped pages count toward this process's memory."""
    mapped = reader.data.base
    if isinstance(mapped, mmap.mmap) and hasattr(mapped, "madvise"):  # not on Windows
        mapped.madvise(mmap.MADV_DONTNEED)


def _reader_class(has_lists: bool) -> type[GGUFReader]:
    import gguf

    class Reader(gguf.GGUFReader):
        """A reader that reads arrays in bulk; the base class takes 20 us per item."""

        def _get_field_parts(
            self, orig_offs: int, raw_type: int
        ) -> tuple[int, list[npt.NDArray[Any]], list[int], list[GGUFValueType]]:
            if self.byte_order == "S":
                raise UnsupportedModelError(
                    f"{self.data.filename} has a different byte order; convert it on this machine"
                )
            if raw_type != gguf.GGUFValueType.ARRAY:
                return super()._get_field_parts(orig_offs, raw_type)
            item_type, count = struct.unpack_from("<IQ", self.data.data, orig_offs)
            types = [gguf.GGUFValueType.ARRAY, gguf.GGUFValueType(item_type)]
            if types[1] == gguf.GGUFValueType.STRING:
                strings, end = _read_strings(self.data, orig_offs + 12, count, has_lists)
                return end - orig_offs, strings, list(range(len(strings))), types
            items = self._get(orig_offs + 12, self.gguf_scalar_to_np[types[1]], count)
            if len(items) < count:
                raise ValueError(f"an array of {count} items extends past the end of the file")
            return 12 + items.nbytes, [items], [0], types

    return Reader


def _check_tensors(reader: GGUFReader) -> None:
    for tensor in reader.tensors:
        is_whole = 0 < math.prod(tensor.shape.tolist()) == tensor.n_elements
        end = tensor.data_offset + tensor.n_bytes
        if not is_whole or not reader.data_offset <= tensor.data_offset < end <= len(reader.data):
            raise ValueError(f"tensor {tensor.name} has invalid offsets {tensor.data_offset}:{end}")


def _read_strings(
    data: npt.NDArray[np.uint8], offset: int, count: int, is_kept: bool
) -> tuple[list[npt.NDArray[Any]], int]:
    """Read length-prefixed strings; return them (none unless `is_kept`) and the end offset."""
    plain, strings = data.view(np.ndarray), []  # slicing a memmap is slow
    view, read_length = plain.data, struct.Struct("<Q").unpack_from
    for _ in range(count):
        start = offset + 8
        offset = start + read_length(view, offset)[0]
        if is_kept:
            strings.append(plain[start:offset])
    return strings, offset


def to_float(data: npt.NDArray[Any], kind: GGMLQuantizationType) -> npt.NDArray[Any]:
    """Return a copy of the data as floats; it is writable and outlives the memory map."""
    import gguf

    if kind.name in ("F32", "F16"):
        return np.array(data)
    block_len, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = data.reshape(-1, block_bytes)
    array = np.empty((len(blocks), block_len), np.float32)
    # Pass one long row: the package processes many rows 16 at a time, which is 3 times slower.
    num_blocks = DEQUANTIZED_ELEMENTS // block_len
    for first in range(0, len(blocks), num_blocks):
        row = blocks[first : first + num_blocks].reshape(1, -1)
        values = gguf.quants.dequantize(row, kind)
        array[first : first + num_blocks] = values.reshape(-1, block_len)
    return array.reshape(*data.shape[:-1], -1)
