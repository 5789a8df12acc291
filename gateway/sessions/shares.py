"""The parts of a memory that tenants have, of which the largest is always known."""

from collections import Counter


class Shares:
    """Counts by tenant. Every call takes constant time, however many tenants there are."""

    def __init__(self) -> None:
        self._sizes: Counter[str] = Counter()
        self._of_size: dict[int, dict[str, None]] = {}
        self._most = 0

    @property
    def largest(self) -> str:
        """The tenant that has the most; of several the one that has had it longest. One must have some."""
        return next(iter(self._of_size[self._most]))

    def add(self, tenant: str) -> None:
        size = self._move(tenant, 1)
        self._most = max(self._most, size)

    def remove(self, tenant: str) -> None:
        size = self._move(tenant, -1)
        if self._most not in self._of_size:  # it was alone there, and is the largest still
            self._most = size

    def _move(self, tenant: str, num: int) -> int:
        """The tenant's new size."""
        size = self._sizes[tenant]
        if size:
            tenants = self._of_size[size]
            del tenants[tenant]
            if not tenants:
                del self._of_size[size]
        size += num
        assert size >= 0, f"{tenant} has nothing"
        if size:
            self._sizes[tenant] = size
            self._of_size.setdefault(size, {})[tenant] = None
        else:
            del self._sizes[tenant]
        return size

    def check(self, sizes: Counter[str]) -> None:
        """Raises AssertionError unless tenants have what `sizes` says."""
        assert self._sizes == sizes, "shares don't add up"
        placed = {tenant: size for size, tenants in self._of_size.items() for tenant in tenants}
        assert placed == sizes, "tenants stand elsewhere"
        assert self._most == max(sizes.values(), default=0), "another has the most"
