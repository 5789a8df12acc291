"""`make rounds`: files run until they have had their rounds, and what fails once is kept."""

import pytest

from support.rounds import Progress, Rounds

pytest_plugins = "pytester"

TESTS = """
import itertools
import pytest

ups, runs = itertools.count(1), itertools.count(1)

@pytest.fixture(scope="module")
def up():
    return next(ups)

@pytest.fixture
def run():
    return next(runs)

def test_it(up, run):
    assert up == run
    assert run != 2, "the second round"
"""


def test_each_round_is_whole_and_a_failure_in_one_is_kept(
    pytester: pytest.Pytester,
) -> None:
    """A file that had some rounds before has only those that are missing."""
    pytester.makepyfile(test_a=TESTS, test_b="def test_it(): pass", test_c="import nothing")
    progress = Progress(pytester.path / "build/rounds.json")
    files = ["test_a.py", "test_b.py", "test_c.py"]
    progress.begin(dict.fromkeys(files, "1"))
    progress.files["test_b.py"]["rounds"] = 1
    options = ["-p", "no:cacheprovider", "--continue-on-collection-errors", *files]
    result = pytester.inline_run(*options, plugins=[Rounds(progress, files, 3)])
    result.assertoutcome(passed=4, failed=2)  # one is the import
    kept = Progress(pytester.path / "build/rounds.json")
    assert [kept.files[file]["rounds"] for file in files] == [3, 3, 3]
    assert kept.pending(files, 3) == []
    [failure] = kept.files["test_a.py"]["failures"]
    assert (failure["test"], failure["round"]) == ("test_a.py::test_it", 2)
    assert "the second round" in kept.table(files)
    assert "test_a.py::test_it: 1 of 3 rounds failed" in kept.table(files)
    assert "No module named 'nothing'" in kept.files["test_c.py"]["failures"][0]["tail"]
    kept.begin({"test_a.py": "2", "test_b.py": "1"})
    assert kept.pending(files, 3) == ["test_a.py"]
    assert kept.table(files[:1]) == ""
