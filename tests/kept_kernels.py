"""Keep the machine code of the CPU kernels outside the clone: a new clone need not compile them.

Numba keeps it beside the sources, and loads it where a source has the time and size that it had.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

SOURCES = Path(__file__).parents[1] / "nanovllm" / "devices" / "cpu" / "kernels"
COMPILED = SOURCES / "__pycache__"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nanovllm-tests"
STAMPS = "stamps.json"  # when each source was changed, in nanoseconds


def restore_kernels() -> None:
    """Fill a clone that has compiled nothing yet."""
    kept = _folder()
    if kept is None or not kept.exists() or _compiled(COMPILED):
        return
    COMPILED.mkdir(exist_ok=True)
    for file in _compiled(kept):
        shutil.copy(file, COMPILED)
    for name, stamp in json.loads((kept / STAMPS).read_text()).items():
        os.utime(SOURCES / name, ns=(stamp, stamp))


def keep_kernels() -> None:
    """Keep what is compiled, if it is more than what is kept."""
    kept = _folder()
    if kept is None or len(_compiled(COMPILED)) <= len(_compiled(kept)):
        return
    kept.parent.mkdir(parents=True, exist_ok=True)
    new = Path(tempfile.mkdtemp(dir=kept.parent))
    for file in _compiled(COMPILED):
        shutil.copy(file, new)
    stamps = {source.name: source.stat().st_mtime_ns for source in SOURCES.glob("*.py")}
    (new / STAMPS).write_text(json.dumps(stamps))
    shutil.rmtree(kept, ignore_errors=True)
    try:
        new.rename(kept)
    except OSError:  # another process was first
        shutil.rmtree(new)


def _folder() -> Path | None:
    """A folder for these sources, this numba and this Python; None without numba."""
    try:
        names = f"{version('numba')} {sys.version} {platform.platform()}"
    except PackageNotFoundError:
        return None
    digest = hashlib.sha256(names.encode())
    for source in sorted(SOURCES.glob("*.py")):
        digest.update(source.name.encode() + source.read_bytes())
    return CACHE / "kernels" / digest.hexdigest()[:16]


def _compiled(folder: Path) -> list[Path]:
    return [*folder.glob("*.nb[ci]")]
