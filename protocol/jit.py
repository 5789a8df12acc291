"""Compiling kernels: numba behind typed decorators, with a cache on disk.

Kernels are compiled at their first call for each combination of argument types, or read from a cache
on disk. numba checks a cached kernel against the file it is in, not against the files of the kernels
it calls: so a cache's folder is named after the text of all of them. Whoever has kernels makes one `Jit`
and keeps those that call each other in its folder `kernels`.

Nothing else of this package may import this module: it loads numba.
"""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
from numba.core import config as numba_config

_Function = TypeVar("_Function", bound=Callable[..., Any])


class Jit:
    """Decorators for the kernels of the package that `source` is a file of."""

    def __init__(self, source: str | Path) -> None:
        """`source`: the package's own module of decorators, beside its folder `kernels`."""
        self._cache_folder = _cache_folder(Path(source))

    def kernel(self, function: _Function) -> _Function:
        """`function`, compiled by numba; without a folder to cache it in, anew in every process."""
        return self._compiled(function, False)

    def lane_kernel(self, function: _Function) -> _Function:
        """As `kernel`; without NaN or signed zeros, so that a minimum is taken several at a time."""
        return self._compiled(function, {"nnan", "nsz"})

    def _compiled(self, function: _Function, fastmath: bool | set[str]) -> _Function:
        config: Any = numba_config  # without types of its own
        before = config.CACHE_DIR
        folder = self._cache_folder
        config.CACHE_DIR = folder or before  # read when caching is switched on: now
        try:
            compiled = numba.njit(cache=folder is not None, error_model="numpy", fastmath=fastmath)(
                function
            )
        finally:
            config.CACHE_DIR = before
        return cast(_Function, compiled)


def _cache_folder(source: Path) -> str | None:
    """The first folder that can be written: beside the source, or in the user's cache."""
    here = source.parent
    digest = hashlib.sha256()
    for path in (Path(__file__), source, *sorted((here / "kernels").glob("*.py"))):
        digest.update(path.read_bytes())
    name = f"kernels-{digest.hexdigest()[:16]}"
    for parent in (here / "__pycache__", Path("~/.cache/mallee")):
        try:
            parent = parent.expanduser()
            (parent / name).mkdir(mode=0o700, parents=True, exist_ok=True)
        except (OSError, RuntimeError):
            continue
        if os.access(parent / name, os.W_OK):
            return str(parent / name)
    return None
