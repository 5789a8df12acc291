"""Helm's engine is a library (PyPI helm-python-sdk), which is not there for every platform."""

import pytest


@pytest.fixture(autouse=True, scope="session")
def _helm() -> None:
    pytest.importorskip(
        "helm_python", reason="PyPI's helm-python-sdk has no wheel for this platform"
    )
