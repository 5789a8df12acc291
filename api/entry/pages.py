"""Lists a page at a time: all are by id, and go on behind one that may be gone by then."""

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from mallee.api.entry.asking import read_count

MAX_LISTED: Final = 100  # things of one page


class Page(NamedTuple):
    """The part of a list that is asked for: the first `limit` things behind the id `after`."""

    after: str
    limit: int

    @property
    def most(self) -> int:
        """Things to look for: one more than are shown tells that there are more."""
        return self.limit + 1

    def body(self, found: Sequence[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """The answer, of `most` things if there are so many, with further fields."""
        part = found[: self.limit]
        return {
            "object": "list",
            "data": part,
            "first_id": part[0]["id"] if part else None,
            "last_id": part[-1]["id"] if part else None,
            "has_more": len(found) > self.limit,
            **more,
        }


def read_page(query: Mapping[str, str]) -> Page:
    """Raises InvalidParameter."""
    limit = read_count(query.get("limit"), "limit", 20, MAX_LISTED)
    return Page(query.get("after", ""), limit)
