"""Kernels are compiled once, read from a cache by the next process, and anew when any text changes."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
from numba.core import config as numba_config

import mallee.protocol
from mallee.protocol.jit import cache_folder, kernel_sources

SOURCE = """
from mallee.protocol.jit import Jit

kernel = Jit(__file__).kernel
"""
KERNELS = """
from decorators import kernel


@kernel
def twice(x: int) -> int:
    return 2 * x
"""
USE = """
from numbers_ import twice

twice(3)
print(sum(twice.stats.cache_hits.values()), sum(twice.stats.cache_misses.values()), twice(21))
"""


def use(folder: Path) -> tuple[int, ...]:
    """(cache hits, misses, what the kernel gives) in a process of its own."""
    environ = os.environ | {"PYTHONPATH": os.pathsep.join((str(folder), str(folder / "kernels")))}
    done = subprocess.run(
        [sys.executable, "-c", USE], capture_output=True, text=True, check=True, env=environ
    )
    return tuple(map(int, done.stdout.split()))


def sources(package: str, module: str) -> set[str]:
    top = Path(mallee.protocol.__file__).resolve().parents[1]
    found = [path.relative_to(top) for path in kernel_sources(top / package / module)]
    return {path.relative_to(package).as_posix() for path in found if path.parts[0] == package}


def test_the_next_process_reads_what_one_has_compiled(tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "decorators.py").write_text(SOURCE)
    (tmp_path / "kernels" / "numbers_.py").write_text(KERNELS)
    assert use(tmp_path) == (0, 1, 42)
    assert use(tmp_path) == (1, 0, 42)
    assert len(list((tmp_path / "__pycache__").glob("kernels-*"))) == 1
    (tmp_path / "kernels" / "others.py").write_text("from decorators import kernel\n")
    assert use(tmp_path) == (0, 1, 42)
    assert len(list((tmp_path / "__pycache__").glob("kernels-*"))) == 2


def test_kernels_that_came_with_an_image_are_copied_where_nothing_there_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, home = tmp_path / "decorators.py", tmp_path / "home"
    source.write_text(SOURCE)
    monkeypatch.setattr(numba_config, "CACHE_DIR", str(tmp_path / "image"))
    monkeypatch.setenv("HOME", str(home))
    made = cache_folder(source)
    assert made is not None
    assert Path(made).parent == tmp_path / "image"
    (Path(made) / "twice.nbc").write_text("machine code")
    (tmp_path / "__pycache__").write_text("no folder")
    can_access = os.access
    monkeypatch.setattr(
        os, "access", lambda path, mode: str(path) != made and can_access(path, mode)
    )
    for _ in range(2):  # also once they are there
        found = cache_folder(source)
        assert found is not None
        assert Path(found).parent == home / ".cache" / "mallee"
        assert [path.name for path in Path(found).iterdir()] == ["twice.nbc"]
    assert len(list(Path(found).parent.iterdir())) == 1


def test_the_cache_is_keyed_by_kernels_in_any_folder_and_by_the_constants_they_import() -> None:
    router = sources("router", "jit.py")
    assert {"placement/kernels/score.py", "load/layout.py", "index/kernels/layout.py"} <= router
    assert "programs/visits.py" in sources("synth", "core/jit.py")


def test_nothing_else_of_protocol_loads_numba() -> None:
    for path in Path(mallee.protocol.__file__).parent.glob("*.py"):
        names = {
            node.module if isinstance(node, ast.ImportFrom) else alias.name
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Import | ast.ImportFrom)
            for alias in node.names
        }
        if path.name != "jit.py":
            assert not names & {"numba", "mallee.protocol.jit"}, path
