"""The bound on the processor time of a test."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from support import processor_time
from support.processor_time import LANDING_S, LIMIT_S, limit_of, pytest_pyfunc_call


def test_a_landing_test_has_more_time_where_it_is_listed_and_a_nightly_one_any() -> None:
    listed = {"test_a.py::test_big": "it is big"}
    assert limit_of("tests/test_a.py::test_small", is_nightly=False, listed=listed) == LANDING_S
    assert limit_of("tests/test_a.py::test_big[1]", is_nightly=False, listed=listed) == LIMIT_S
    assert limit_of("tests/test_a.py::test_small", is_nightly=True, listed=listed) is None


@pytest.mark.parametrize(("spent_s", "passes"), [(4.9, True), (5.1, False)])
def test_a_test_that_takes_too_long_fails(
    spent_s: float, passes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: Iterator[float] = iter([10.0, 10.0 + spent_s])
    # The bound on this test itself reads it, too, when it ends.
    monkeypatch.setattr(processor_time, "used_s", lambda: next(used, 0.0))
    config = SimpleNamespace(getoption=lambda *_: None)
    item = SimpleNamespace(nodeid="tests/test_a.py::test_b", path=Path(__file__), config=config)
    hook = pytest_pyfunc_call(item)  # type: ignore[arg-type]
    next(hook)
    if passes:
        with pytest.raises(StopIteration):
            hook.send(None)
    else:
        with pytest.raises(pytest.fail.Exception, match=r"took 5\.1 s of processor time"):
            hook.send(None)
