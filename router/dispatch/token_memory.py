"""The tokens of capsules, so that a fork can be computed where its capsule is not.

Capsules of one tree share their beginnings: each remembers only what it adds to the path it came from.
"""

from collections import OrderedDict
from typing import NamedTuple, Protocol

import numpy as np
from msgspec import structs

from mallee.protocol.hashing import Tokens
from mallee.protocol.ids import CapsuleId, Scope
from mallee.protocol.messages import Continuation, Grammar
from mallee.protocol.model import BASE_WEIGHTS, WeightVersion

ENTRY_NBYTES = 400  # of an entry and its path beside the tokens, about


class StoredAs(NamedTuple):
    """A path whose text is that of a stored capsule, so that longer ones can be stored as what they add."""

    capsule: CapsuleId
    edition: int  # of its text there: another one has replaced the one before
    depth: int  # the number of others that its text begins with there
    since: float  # seconds since the epoch, when the oldest of them was stored


class TokenPath:
    """Tokens after those of `parent`. Counted by its memory while an entry or a longer path is there."""

    __slots__ = ("is_continued", "length", "num_users", "parent", "scope", "stored", "tail")

    def __init__(self, parent: "TokenPath | None", tail: Tokens, scope: Scope) -> None:
        self.parent = parent
        self.tail = tail
        self.scope = scope
        self.length: int = len(tail) + (parent.length if parent is not None else 0)
        self.num_users = 0
        self.stored: StoredAs | None = None
        self.is_continued = False  # another stored text may begin with it

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
        return TokenPath(path.parent, path.tail[: num_tokens - above].copy(), path.scope)

    def tokens(self) -> Tokens:
        """All of it, from the first token on."""
        tails = []
        path: TokenPath | None = self
        while path is not None:
            tails.append(path.tail)
            path = path.parent
        tokens: Tokens = np.concatenate(tails[::-1])
        return tokens

    def is_equal(self, other: "TokenPath") -> bool:
        """Whether both have the same tokens, in one scope."""
        if (self.length, self.scope) != (other.length, other.scope):
            return False
        return self is other or np.array_equal(self.tokens(), other.tokens())


class CapsuleTokens(NamedTuple):
    """All that another worker needs to compute a capsule anew."""

    path: TokenPath
    grammar: Grammar | None = None  # that its text is in; `consumed`: the tokens of it so far
    ttl_s: float | None = None  # asked for when it was made; None: an answer left it
    weights: WeightVersion = BASE_WEIGHTS  # that made it
    is_own: bool = True  # False: another gateway made the capsule, and told its tokens
    continuation: Continuation | None = None  # the branch that left it

    def first(self, num_tokens: int) -> "CapsuleTokens":
        """Those of its first tokens, as an answer would have left them."""
        cut = self.path.length - num_tokens
        left = self.continuation.earlier(cut) if self.continuation is not None else None
        grammar = self.grammar.before(cut) if self.grammar is not None else None
        path = self.path.first(num_tokens)
        return CapsuleTokens(path, grammar, None, self.weights, self.is_own, left)

    def cut(self, num_tokens: int, residue: Tokens) -> "CapsuleTokens":
        """Those of its first tokens with `residue` after them, which its branch drew, so to speak."""
        entry, num_new = self.first(num_tokens)._replace(ttl_s=self.ttl_s), len(residue)
        if not num_new:
            return entry
        left, grammar = entry.continuation, entry.grammar
        if left is not None:
            left = structs.replace(left, drawn=left.drawn + num_new)
        if grammar is not None:
            grammar = structs.replace(grammar, consumed=grammar.consumed + num_new)
        path = TokenPath(entry.path, residue, entry.path.scope)
        return entry._replace(path=path, grammar=grammar, continuation=left)


class TextStore(Protocol):
    """Has the texts of kept capsules outlive this process."""

    def put(self, capsule: CapsuleId, entry: CapsuleTokens, before: CapsuleTokens | None) -> None:
        """A capsule that is kept, or was until now; it was known as `before`."""
        ...

    def drop(self, capsule: CapsuleId, entry: CapsuleTokens) -> None:
        """A capsule that is not made after all."""
        ...


class TokenMemory:
    """Tokens of at most `max_nbytes`; beyond it the least recently used capsule is forgotten.

    What is kept here is put into the `store` as well, if there is one.
    """

    def __init__(self, max_nbytes: int) -> None:
        self.max_nbytes = max_nbytes
        self.store: TextStore | None = None
        self._entries: OrderedDict[CapsuleId, CapsuleTokens] = OrderedDict()
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, capsule: object) -> bool:
        return capsule in self._entries

    def keep(self, capsule: CapsuleId, entry: CapsuleTokens, *, is_stored: bool = False) -> None:
        """Remember `entry` as `capsule`; instead of it the least recently used ones are forgotten.

        One that `is_stored` comes from the store.
        """
        before = self._entries.get(capsule)
        if before is not None and before.path.is_equal(entry.path):  # computed again, for one
            entry = entry._replace(path=before.path)
        self._use(entry.path)
        if capsule in self._entries:
            self.forget(capsule)
        self._entries[capsule] = entry
        while self.nbytes > self.max_nbytes:
            self.forget(next(iter(self._entries)))
        is_kept = entry.ttl_s is not None or (before is not None and before.ttl_s is not None)
        if self.store is not None and is_kept and not is_stored and entry != before:
            self.store.put(capsule, entry, before)

    def get(self, capsule: CapsuleId) -> CapsuleTokens | None:
        """The tokens of a capsule, if they are known; now the most recently used."""
        entry = self._entries.get(capsule)
        if entry is not None:
            self._entries.move_to_end(capsule)
        return entry

    def drop(self, capsule: CapsuleId) -> None:
        """Forget `capsule` here and in the store: it is not made after all."""
        entry = self._entries.get(capsule)
        if self.forget(capsule) and self.store is not None and entry is not None:
            self.store.drop(capsule, entry)

    def forget(self, capsule: CapsuleId) -> bool:
        """Forget `capsule`. False if it was not known."""
        entry = self._entries.pop(capsule, None)
        if entry is None:
            return False
        self._leave(entry.path)
        return True

    def check(self) -> None:
        """Raises AssertionError unless users and bytes follow from the capsules, and the bound holds."""
        assert self.nbytes <= self.max_nbytes, f"{self.nbytes} bytes > {self.max_nbytes}"
        users: dict[TokenPath, int] = {}
        fresh = [entry.path for entry in self._entries.values()]
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
