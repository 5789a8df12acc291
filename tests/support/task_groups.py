"""The groups of background tasks that a service makes, and what runs in them."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from mallee.runtime.tasks import Tasks

FLIP_S = 2.0  # in which health says that a task broke


@contextmanager
def groups() -> Iterator[list[Tasks]]:
    """The groups that are made meanwhile."""
    made: list[Tasks] = []
    init = Tasks.__init__

    def noted(self: Tasks, service: str) -> None:
        init(self, service)
        made.append(self)

    with mock.patch.object(Tasks, "__init__", noted):
        yield made


def running(made: list[Tasks]) -> list[tuple[str, asyncio.Task[None]]]:
    """The tasks that run now, with their group and name, in a fixed order."""
    found = [(f"{g._service}: {t.get_name()}", t) for g in made for t in g._tasks if not t.done()]
    return sorted(found, key=lambda each: each[0])
