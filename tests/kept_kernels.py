"""Cache compiled CPU kernels outside the clone, so that a new clone need not compile them.

Numba keeps compiled code beside the sources, and loads it only if the modification time and size of
the source are unchanged.
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
STAMPS = "stamps.json"  # modification time of each source, in nanoseconds


def restore_kernels() -> None:
    """Copy cached kernels to a clone that has compiled none yet."""
    kept = _folder()
    if kept is None or not kept.exists() or _compiled(COMPILED):
        return
    COMPILED.mkdir(exist_ok=True)
    for file in _compiled(kept):
        shutil.copy(file, COMPILED)
    for name, stamp in json.loads((kept / STAMPS).read_text()).items():
        os.utime(SOURCES / name, ns=(stamp, stamp))


def keep_kernels() -> None:
    """Update the cache if this clone has compiled more kernels."""
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
    except OSError:  # another process was faster
        shutil.rmtree(new)


def _folder() -> Path | None:
    """Return the cache folder for these sources, numba and Python; None without numba."""
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
