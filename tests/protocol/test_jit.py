"""Kernels are compiled once, read from a cache by the next process, and anew when any text changes."""

import ast
import os
from pathlib import Path

import pytest
from numba.core import config as numba_config

import mallee.protocol
from mallee.protocol.jit import cache_folder, kernel_sources


def sources(package: str, module: str) -> set[str]:
    top = Path(mallee.protocol.__file__).resolve().parents[1]
    found = [path.relative_to(top) for path in kernel_sources(top / package / module)]
    return {path.relative_to(package).as_posix() for path in found if path.parts[0] == package}


def test_kernels_that_came_with_an_image_are_copied_where_nothing_there_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, home = tmp_path / "decorators.py", tmp_path / "home"
    source.write_text("from mallee.protocol.jit import Jit\n\nkernel = Jit(__file__).kernel\n")
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
