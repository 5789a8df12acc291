"""Memory by scope, within one bound, which no scope can take from the others."""

import sys
from collections import OrderedDict
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class ScopedMemory(Generic[T]):
    """Items of at most `max_nbytes`; beyond it the scope with most of them loses its oldest.

    Items are told apart by identity or by what hashes alike. Its owner keeps threads apart.
    """

    def __init__(self, max_nbytes: int) -> None:
        self.max_nbytes = max_nbytes
        self.nbytes = 0
        self._items: dict[str, OrderedDict[T, int]] = {}  # by scope, the one used last at the end
        self._nbytes: dict[str, int] = {}

    def put(self, scope: str, item: T, nbytes: int) -> list[T]:
        """Keep an item, or one that has grown. The items that make room for it; that may be itself."""
        items = self._items.setdefault(scope, OrderedDict())
        more = nbytes - items.get(item, 0)
        items[item] = nbytes
        items.move_to_end(item)
        self._nbytes[scope] = self._nbytes.get(scope, 0) + more
        self.nbytes += more
        dropped: list[T] = []
        while self.nbytes > self.max_nbytes:
            fullest = max(self._nbytes, key=self._nbytes.__getitem__)
            dropped.append(oldest := next(iter(self._items[fullest])))
            self.drop(fullest, oldest)
        return dropped

    def has(self, scope: str, item: T) -> bool:
        return item in self._items.get(scope, ())

    def use(self, scope: str, item: T) -> None:
        """The item, if it is still there, is the one used last."""
        if self.has(scope, item):
            self._items[scope].move_to_end(item)

    def drop(self, scope: str, item: T) -> None:
        nbytes = self._items[scope].pop(item)
        self.nbytes -= nbytes
        self._nbytes[scope] -= nbytes
        if not self._items[scope]:
            del self._items[scope], self._nbytes[scope]

    def nbytes_of(self, scope: str) -> int:
        return self._nbytes.get(scope, 0)

    def check(self) -> None:
        """Raises AssertionError if bytes don't add up, or are too many."""
        assert self.nbytes <= self.max_nbytes, f"{self.nbytes} bytes > {self.max_nbytes}"
        assert self.nbytes == sum(self._nbytes.values()), "bytes differ from the scopes'"
        sums = {scope: sum(items.values()) for scope, items in self._items.items()}
        assert sums == self._nbytes, "bytes of scopes differ from their items'"
        assert all(self._items.values()), "an empty scope"


def nbytes_of(value: Any) -> int:
    """Of a value of JSON, with all in it; the names of objects are counted each time."""
    num, left = 0, [value]
    while left:
        each = left.pop()
        num += sys.getsizeof(each)
        if type(each) is dict:
            left += each
            left += each.values()
        elif type(each) is list:
            left += each
    return num
