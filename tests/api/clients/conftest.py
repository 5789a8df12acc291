"""Packages of others, which block and have event loops of their own, against a server in a thread."""

from typing import Any

import pytest


@pytest.fixture
def live(live_in_thread: Any) -> Any:
    return live_in_thread
