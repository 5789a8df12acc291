"""Compiling kernels: numba behind typed decorators, with a cache on disk.

Kernels are compiled at their first call for each combination of argument types, or read from a cache
on disk. numba checks a cached kernel against the file it is in, not against the files of the kernels
and constants that it uses: so a cache's folder is named after the text of all files of the package that
hold kernels, and of all files of ours that these import. A package with kernels makes one `Jit`.

Nothing else of this package may import this module: it loads numba.
"""

import hashlib
import os
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, TypeVar, cast

import numba
from numba.core import config as numba_config

_Function = TypeVar("_Function", bound=Callable[..., Any])


class Jit:
    """Decorators for the kernels of the package that `source` is a file of."""

    def __init__(self, source: str | Path) -> None:
        """`source`: the module of the package's decorators, above all files that use them."""
        self._cache_folder = cache_folder(Path(source))

    def kernel(self, function: _Function) -> _Function:
        """`function`, compiled by numba; without a folder to cache it in, anew in every process."""
        config: Any = numba_config  # without types of its own
        before = config.CACHE_DIR
        folder = self._cache_folder
        config.CACHE_DIR = folder or before  # read when caching is switched on: now
        try:
            compiled = numba.njit(cache=folder is not None, error_model="numpy")(function)
        finally:
            config.CACHE_DIR = before
        return cast(_Function, compiled)


def kernel_sources(source: Path) -> list[Path]:
    """The package's files that use these decorators, and all files of Mallee that they import."""
    top = Path(__file__).resolve().parents[1]  # of the packages; links below `mallee` lead there
    name = source.stem
    uses = re.compile(rf"^from [\w.]*\b{name} import", re.MULTILINE)
    source = source.resolve()
    folder = top / source.relative_to(top).parts[0] if source.is_relative_to(top) else source.parent
    found = {Path(__file__).resolve(), source}
    queue = [path for path in folder.rglob("*.py") if uses.search(path.read_text(encoding="utf-8"))]
    while queue:
        path = queue.pop()
        if path in found:
            continue
        found.add(path)
        for module, names in _IMPORT.findall(path.read_text(encoding="utf-8")):
            base = top.joinpath(*module.split("."))
            candidates = [base.with_suffix(".py")]
            candidates += [base / f"{each}.py" for each in re.findall(r"\w+", names)]
            queue += [each for each in candidates if each.is_file()]
    return sorted(found)


_IMPORT: Final = re.compile(r"^from mallee\.([\w.]+) import ([^(\n]+|\([^)]*\))", re.MULTILINE)


def cache_folder(source: Path) -> str | None:
    """The first folder that can be written: numba's own setting, beside the source, or the user's cache.

    Kernels in the folder of the setting (`NUMBA_CACHE_DIR`) that can only be read, as in an image, are
    copied to the one that is found.
    """
    digest = hashlib.sha256()
    for path in kernel_sources(source):
        digest.update(path.read_bytes())
    name = f"kernels-{digest.hexdigest()[:16]}"
    config: Any = numba_config  # without types of its own
    given = Path(config.CACHE_DIR) if config.CACHE_DIR else None
    for parent in (given, source.parent / "__pycache__", Path("~/.cache/mallee")):
        if parent is None:
            continue
        try:
            folder = parent.expanduser() / name
            if given is not None and parent != given:
                _copy(given / name, folder)
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except (OSError, RuntimeError):
            continue
        if os.access(folder, os.W_OK):
            return str(folder)
    return None


def _copy(made: Path, folder: Path) -> None:
    """Copy kernels that were made before, whole or not at all: other processes do so at once."""
    if folder.exists() or not made.is_dir():
        return
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent) as inside:
        copied = shutil.copytree(made, Path(inside) / "kernels", copy_function=shutil.copyfile)
        copied.chmod(0o700)
        with suppress(OSError):  # another process was first
            copied.rename(folder)
