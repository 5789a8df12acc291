"""The KV blocks of a stub worker: which are in use, which are kept, which go first."""

from collections import OrderedDict
from collections.abc import Sequence

Blocks = tuple[int, ...]


class BlockCache:
    """Blocks by hash. Those that a path in use needs stay; of the others the least recently used goes."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._sealed: set[int] = set()
        self._idle: OrderedDict[int, None] = OrderedDict()  # sealed, used by nobody
        self._users: dict[int, int] = {}  # paths in use that need it, by block
        self._paths: dict[tuple[int, int], int] = {}  # rows and capsules, by (last block, length)

    def __contains__(self, block: int) -> bool:
        """Whether it is computed."""
        return block in self._sealed

    @property
    def num_sealed(self) -> int:
        return len(self._sealed)

    @property
    def num_used(self) -> int:
        return len(self._users)

    def num_used_with(self, blocks: Blocks) -> int:
        """Blocks in use if `blocks` were too."""
        if _path(blocks) in self._paths:
            return len(self._users)
        return len(self._users) + sum(block not in self._users for block in blocks)

    def use(self, blocks: Blocks) -> None:
        """They stay until as many calls of `leave`."""
        path = _path(blocks)
        self._paths[path] = self._paths.get(path, 0) + 1
        if self._paths[path] == 1:
            for block in blocks:
                self._users[block] = self._users.get(block, 0) + 1
                self._idle.pop(block, None)

    def leave(self, blocks: Blocks) -> None:
        """One use of them is over."""
        path = _path(blocks)
        self._paths[path] -= 1
        if self._paths[path]:
            return
        del self._paths[path]
        for block in reversed(blocks):  # the ends of paths are evicted first
            self._users[block] -= 1
            if not self._users[block]:
                del self._users[block]
                if block in self._sealed:
                    self._idle[block] = None

    def seal(self, blocks: Sequence[int]) -> None:
        """They are computed."""
        self._sealed.update(blocks)
        self._idle.update((block, None) for block in blocks if block not in self._users)

    def make_room(self, other_blocks: int) -> list[int]:
        """Idle blocks that had to go so that `other_blocks` more fit beside all that is here."""
        removed = []
        while self._idle and len(self._users) + len(self._idle) + other_blocks > self.num_blocks:
            block, _ = self._idle.popitem(last=False)
            self._sealed.discard(block)
            removed.append(block)
        return removed

    def check(self) -> None:
        """Raises AssertionError unless the tables agree."""
        assert set(self._idle) == self._sealed - self._users.keys(), (
            "idle are not the unused sealed"
        )
        assert all(count > 0 for count in self._users.values()), "a block used by nobody"


def _path(blocks: Blocks) -> tuple[int, int]:
    return (blocks[-1] if blocks else 0, len(blocks))
