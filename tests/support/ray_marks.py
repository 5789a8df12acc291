"""Marks of tests that start Ray in pytest's own process."""

from typing import Final

import pytest

PROCESS_MARKS: Final = [
    pytest.mark.process,
    pytest.mark.ray,
    pytest.mark.nats,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::pydantic.PydanticDeprecatedSince20"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray"),
    pytest.mark.filterwarnings("ignore::FutureWarning:ray"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # Ray's own pipes and sockets
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
