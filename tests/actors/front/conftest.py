"""Pickers in the process of the tests."""

import pytest


@pytest.fixture(autouse=True)
def plain_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the process's garbage collection and its switches of threads as other tests find them."""
    for name in ("share_interpreter", "freeze_heap"):
        monkeypatch.setattr(f"mallee.actors.front.front.{name}", lambda: None)
