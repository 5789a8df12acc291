"""Lists a page at a time: all are by id, and go on behind one that may be gone by then."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, Final, NamedTuple, TypeVar

from mallee.api.entry.asking import read_count
from mallee.protocol.api.shared import Page

MAX_LISTED: Final = 100  # things of one page

P = TypeVar("P", bound=Page[Any])
T = TypeVar("T")


class Paging(NamedTuple):
    """The part of a list that is asked for: the first `limit` things behind the id `after`."""

    after: str
    limit: int

    @property
    def most(self) -> int:
        """Things to look for: one more than are shown tells that there are more."""
        return self.limit + 1

    async def read(
        self, names: Sequence[str], read: Callable[[str], Awaitable[T | None]]
    ) -> list[T]:
        """The first `most` things of these `names`, which are in order; some may be gone by now."""
        rest, found = [name for name in names if name > self.after], list[T]()
        while rest and (num := self.most - len(found)):
            things = await asyncio.gather(*map(read, rest[:num]))
            found += [each for each in things if each is not None]
            rest = rest[num:]
        return found

    def page(
        self,
        kind: type[P],
        found: Sequence[T],
        *,
        id_of: Callable[[T], str] = attrgetter("id"),
        **more: Any,
    ) -> P:
        """The answer of a `kind`, of `most` things if there are so many, with its further fields."""
        part = [*found[: self.limit]]
        return kind(
            data=part,
            first_id=id_of(part[0]) if part else None,
            last_id=id_of(part[-1]) if part else None,
            has_more=len(found) > self.limit,
            **more,
        )


def read_paging(query: Mapping[str, str]) -> Paging:
    """Raises InvalidParameter."""
    limit = read_count(query.get("limit"), "limit", 20, MAX_LISTED)
    return Paging(query.get("after", ""), limit)
