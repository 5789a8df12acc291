"""Profiles of tests are measured on machines that other tests fill."""

import pytest


@pytest.fixture(autouse=True)
def idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mallee.mocker.measure.busy_cores", lambda: 0.25)
