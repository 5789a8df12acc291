"""`make affected`: a change reaches the tests that import what it changed, and those that read it."""

from pathlib import Path

import pytest

from support.affected import changed, git, lanes_changed, reach

FILES = {
    "src/mallee/__init__.py": "",
    "worker/__init__.py": "",
    "worker/pool.py": '"""Blocks. Used by `mallee.worker.engine`."""',
    "worker/engine.py": "from mallee.worker.pool import Pool",
    "worker/text.py": 'DATA = "words.json"',
    "worker/words.json": "{}",
    "bench/fork.py": "def main():\n    from mallee.worker import engine",
    "docs/pages/a.md": "",
    "NOTES": "",
    "pyproject.toml": "",
    "Makefile": "test:\n\tpytest\nlint:\n\truff\n",
    "tests/conftest.py": "def fixture():\n    import mallee.worker.engine",
    "tests/support/rig.py": "from mallee.worker.engine import Engine",
    "tests/worker/conftest.py": "import support.faults",
    "tests/support/faults.py": "",
    "tests/worker/test_pool.py": "import mallee.worker.pool",
    "tests/test_rig.py": "from support.rig import rig",
    "tests/test_bench.py": 'ARGUMENTS = ["-m", "bench.fork"]',
    "tests/worker/test_text.py": "from mallee.worker import text",
    "tests/test_docs.py": 'PAGES = "docs"',
    "tests/test_layers.py": 'PATTERN = "*.py"',
    "tests/test_other.py": "",
}
ALL = {path for path in FILES if "/test_" in path}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for path, text in FILES.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    (tmp_path / "src/mallee/worker").symlink_to("../../worker")
    return tmp_path


@pytest.mark.parametrize(
    ("path", "tests"),
    [
        ("worker/pool.py", {"worker/test_pool", "test_rig", "test_bench", "test_layers"}),
        ("worker/engine.py", {"test_rig", "test_bench", "test_layers"}),
        ("bench/fork.py", {"test_bench", "test_layers"}),
        ("tests/support/faults.py", {"worker/test_pool", "worker/test_text", "test_layers"}),
        ("tests/test_other.py", {"test_other", "test_layers"}),
        ("worker/words.json", {"worker/test_text"}),
        ("docs/pages/a.md", {"test_docs"}),
    ],
)
def test_a_change_reaches_tests_directly_and_through_others_and_no_unrelated_ones(
    path: str, tests: set[str], root: Path
) -> None:
    assert reach([path], root) == {f"tests/{name}.py" for name in tests}


@pytest.mark.parametrize("path", ["worker/__init__.py", "worker/text.py"])
def test_a_removed_file_reaches_the_tests_that_import_it_still(path: str, root: Path) -> None:
    before = reach([path], root)
    (root / path).unlink()
    assert "tests/worker/test_text.py" in before == reach([path], root)


@pytest.mark.parametrize("path", ["tests/conftest.py", "pyproject.toml", "NOTES"])
def test_changes_of_settings_and_of_what_no_file_names_reach_all_tests(
    path: str, root: Path
) -> None:
    assert reach([path], root) == ALL
    assert reach([], root) == set()


def test_a_change_is_what_differs_from_the_base_and_what_is_new(root: Path) -> None:
    identity = ("-c", "user.name=a", "-c", "user.email=a@example.com")
    git("init", "--quiet", root=root)
    git("add", ".", root=root)
    git(*identity, "commit", "--quiet", "--message", "All", root=root)
    assert changed("HEAD", root) == set()
    (root / "worker/pool.py").rename(root / "worker/blocks.py")
    (root / "NOTES").write_text("free")
    git("add", "NOTES", root=root)
    (root / "Makefile").write_text("test:\n\tpytest\nlint:\n\truff check\n")
    assert changed("HEAD", root) == {"worker/pool.py", "worker/blocks.py", "NOTES", "Makefile"}
    assert not lanes_changed("HEAD", root)
    (root / "Makefile").write_text("test:\n\tpytest -x\nlint:\n\truff\n")
    assert lanes_changed("HEAD", root)
