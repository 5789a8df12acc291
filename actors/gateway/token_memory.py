"""The tokens of capsules, so that a fork can be computed where its capsule is not.

Capsules of one tree share their beginnings: each remembers only what it adds to the path it came from.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from mallee.protocol.hashing import Tokens, as_tokens
from mallee.protocol.ids import CapsuleId
from mallee.protocol.messages import Update

ENTRY_NBYTES = 400  # of an entry and its path beside the tokens, about


class TokenPath:
    """Tokens after those of `parent`. Counted by its memory while an entry or a longer path is there."""

    __slots__ = ("length", "num_users", "parent", "salt", "tail")

    def __init__(self, parent: "TokenPath | None", tail: Tokens, salt: str) -> None:
        self.parent = parent
        self.tail = tail
        self.salt = salt
        self.length: int = len(tail) + (parent.length if parent is not None else 0)
        self.num_users = 0

    @property
    def nbytes(self) -> int:
        return self.tail.nbytes + ENTRY_NBYTES

    def first(self, num_tokens: int) -> "TokenPath":
        """The path of its first `num_tokens` tokens: itself, one above it, or a copy."""
        path = self
        while path.parent is not None and path.parent.length >= num_tokens:
            path = path.parent
        if path.length == num_tokens:
            return path
        above = 0 if path.parent is None else path.parent.length
        return TokenPath(path.parent, path.tail[: num_tokens - above].copy(), path.salt)

    def tokens(self) -> Tokens:
        """All of it, from the first token on."""
        tails = []
        path: TokenPath | None = self
        while path is not None:
            tails.append(path.tail)
            path = path.parent
        tokens: Tokens = np.concatenate(tails[::-1])
        return tokens


class TokenMemory:
    """Tokens of at most `max_nbytes`; beyond it the least recently used capsule is forgotten."""

    def __init__(self, max_nbytes: int) -> None:
        self.max_nbytes = max_nbytes
        self._paths: OrderedDict[CapsuleId, TokenPath] = OrderedDict()
        self.nbytes = 0
        self.num_evicted = 0

    def __len__(self) -> int:
        return len(self._paths)

    def __contains__(self, capsule: object) -> bool:
        return capsule in self._paths

    def keep(self, capsule: CapsuleId, path: TokenPath) -> None:
        """Remember `path` as the tokens of `capsule`."""
        self._use(path)
        self.forget(capsule)
        self._paths[capsule] = path
        while self.nbytes > self.max_nbytes:
            self.forget(next(iter(self._paths)))
            self.num_evicted += 1

    def path(self, capsule: CapsuleId) -> TokenPath | None:
        """The tokens of a capsule, if they are known; now the most recently used."""
        path = self._paths.get(capsule)
        if path is not None:
            self._paths.move_to_end(capsule)
        return path

    def forget(self, capsule: CapsuleId) -> bool:
        """Forget `capsule`. False if it was not known."""
        path = self._paths.pop(capsule, None)
        if path is None:
            return False
        self._leave(path)
        return True

    def check(self) -> None:
        """Raises AssertionError unless users and bytes follow from the capsules, and the bound holds."""
        assert self.nbytes <= self.max_nbytes, f"{self.nbytes} bytes > {self.max_nbytes}"
        users: dict[TokenPath, int] = {}
        fresh = list(self._paths.values())
        while fresh:
            path = fresh.pop()
            users[path] = users.get(path, 0) + 1
            if users[path] == 1 and path.parent is not None:
                fresh.append(path.parent)
        assert all(path.num_users == n for path, n in users.items()), (
            "users differ from the entries"
        )
        assert self.nbytes == sum(path.nbytes for path in users), "bytes differ from the paths"

    def _use(self, path: TokenPath) -> None:
        step: TokenPath | None = path
        while step is not None:
            step.num_users += 1
            if step.num_users > 1:
                return
            self.nbytes += step.nbytes
            step = step.parent

    def _leave(self, path: TokenPath) -> None:
        step: TokenPath | None = path
        while step is not None:
            step.num_users -= 1
            if step.num_users:
                return
            self.nbytes -= step.nbytes
            step = step.parent


class Recording:
    """Follows one running request, so that the tokens of the capsules it leaves are known.

    `suffixes`: tokens that each branch adds to `path` before its answer; None: none.
    """

    def __init__(
        self, memory: TokenMemory, path: TokenPath, suffixes: Sequence[Tokens] | None = None
    ) -> None:
        self._memory = memory
        self._path = path
        self._suffixes = suffixes
        self._answers: dict[int, array[int]] = {}  # 4 bytes a token

    def on_update(self, update: Update) -> None:
        """Take in `update`; the tokens of a capsule that it names are kept, if all of them were seen."""
        answer = self._answers.setdefault(update.branch, array("I"))
        answer.extend(update.tokens)
        if update.finish is not None:
            del self._answers[update.branch]
        if update.capsule is None:
            return
        tail = as_tokens(answer)
        if self._suffixes is not None:
            tail = np.concatenate((self._suffixes[update.branch], tail))
        num_new = update.boundary - self._path.length
        if not 0 <= num_new <= len(tail):
            return
        path = self._path
        if num_new:
            path = TokenPath(path, np.array(tail[:num_new], dtype="<u4"), path.salt)
        self._memory.keep(CapsuleId(update.capsule), path)
