"""The trees of sessions: the capsules that each session's requests left, and which continues which.

A fork's parent is its capsule. A prompt's is the earlier capsule of the session whose prompt it begins with,
but for the last tokens: templates end a prompt in their own way where the answer begins. Of several such
the one with the longest prompt, and of its branches the one whose text goes on as the prompt does.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from heapq import nsmallest
from itertools import islice, takewhile
from typing import Final, NamedTuple

import numpy as np
from msgspec import structs

from mallee.gateway.sessions.shares import Shares
from mallee.protocol.gateways.session_notes import NodeNote, SessionNote
from mallee.protocol.hashing import NO_HASHES, Hashes
from mallee.protocol.ids import CapsuleId, RequestId, Scope

MAX_SESSION_NODES: Final = 1024
END_TOKENS: Final = 16  # of a prompt, that the next turn's may not repeat
LATE_S: Final = 60.0  # in which news of a closed session may still be on its way
MAX_CLOSED: Final = 4096

HashesOf = Callable[[CapsuleId], Hashes]
"""The chain hashes of a capsule's full blocks, as far as they are known."""


class SessionKey(NamedTuple):
    """The name of a session in its scope."""

    scope: Scope
    name: str


@dataclass(slots=True)
class SessionTree:
    """One session. Times are seconds since the epoch."""

    key: SessionKey
    created: float
    used: float
    parent: str = ""
    tenant: str = ""
    budget: str = ""  # names the account that bounds it
    given: float = 0.0  # when
    above: str = ""  # the same of a session above it that is over
    nodes: dict[str, NodeNote] = field(default_factory=dict)  # by capsule, oldest first
    running: set[RequestId] = field(default_factory=set)  # here
    num_changes: int = 0  # of `nodes`

    @property
    def last(self) -> NodeNote | None:
        """The newest capsule."""
        return next(reversed(self.nodes.values()), None)

    @property
    def own(self) -> list[CapsuleId]:
        """The capsules of the session itself."""
        return [CapsuleId(node.capsule) for node in self.nodes.values() if not node.is_root]

    def note(self) -> SessionNote:
        return self.told(tuple(self.nodes.values()))

    def told(self, nodes: tuple[NodeNote, ...]) -> SessionNote:
        """News of these nodes for other gateways."""
        return SessionNote(
            *self.key,
            self.parent,
            nodes,
            tenant=self.tenant,
            budget=self.budget,
            given=self.given,
            above=self.above,
        )


class _Asked(NamedTuple):
    """A request under way. `nodes`: those of its session, and of that session's parent, when it began."""

    key: SessionKey
    capsule: CapsuleId | None  # that it continues
    prompt_tokens: int
    is_last: bool
    nodes: tuple[NodeNote, ...]


class SessionTrees:
    """The sessions that one gateway knows. At most `max_nodes` of them and their capsules.

    Beyond that the tenant with the most loses the session that it used longest ago.
    A session without use for `ttl_s` is forgotten. `clock` gives seconds since the epoch.
    """

    def __init__(
        self, *, max_nodes: int, ttl_s: float, block_size: int, clock: Callable[[], float]
    ) -> None:
        self._max_nodes = max_nodes
        self._ttl_s = ttl_s
        self._block_size = block_size
        self._clock = clock
        self._trees: OrderedDict[SessionKey, SessionTree] = OrderedDict()  # last used last
        self._of_scope: dict[Scope, dict[str, SessionTree]] = {}
        self._asked: dict[RequestId, _Asked] = {}
        self._of_capsule: dict[str, SessionKey] = {}  # whose own it is
        self._of_tenant: dict[str, OrderedDict[SessionKey, SessionTree]] = {}  # last used last
        self._shares = Shares()  # of sessions and nodes
        self._size = 0  # sessions and nodes
        self._closed: OrderedDict[SessionKey, float] = OrderedDict()  # when, the last one last

    # Requests

    def begin(
        self,
        request: RequestId,
        key: SessionKey,
        *,
        parent: str = "",
        tenant: str = "",
        capsule: CapsuleId | None = None,
        prompt_tokens: int = 0,
        is_last: bool = False,
    ) -> SessionNote | None:
        """A request of a session begins. Returns news for other gateways: the session is new."""
        is_new = key not in self._trees
        tree = self._used(key, parent, tenant)
        tree.running.add(request)
        above = self._trees.get(SessionKey(key.scope, tree.parent)) if tree.parent else None
        nodes = (*(above.nodes.values() if above else ()), *tree.nodes.values())
        self._asked[request] = _Asked(key, capsule, prompt_tokens, is_last, nodes)
        return tree.told(()) if is_new else None

    def left(
        self,
        request: RequestId,
        capsule: CapsuleId,
        tokens: int,
        hashes: Hashes = NO_HASHES,
        hashes_of: HashesOf = lambda capsule: NO_HASHES,
    ) -> SessionNote | None:
        """A branch of the request left a capsule; `hashes` are of the full blocks of its prompt."""
        asked = self._asked.get(request)
        if asked is None:
            return None
        tree = self._trees.get(asked.key)
        if tree is None or request not in tree.running:
            return None  # it was closed meanwhile
        now = self._clock()
        if asked.capsule is not None:
            before = next((n for n in asked.nodes if n.capsule == asked.capsule), None)
            node = NodeNote(capsule, asked.capsule, request, tokens, now)
            if before is not None:  # its text begins as that one's does
                node = structs.replace(
                    node,
                    prompt_tokens=before.prompt_tokens,
                    prompt_blocks=before.prompt_blocks,
                    prompt_hash=before.prompt_hash,
                )
        else:
            own = max(0, asked.prompt_tokens - END_TOKENS) // self._block_size
            num = min(len(hashes), own or asked.prompt_tokens // self._block_size)
            node = NodeNote(
                capsule=capsule,
                parent=self._parent(asked, hashes, hashes_of),
                request=request,
                tokens=tokens,
                created=now,
                prompt_tokens=asked.prompt_tokens,
                prompt_blocks=num,
                prompt_hash=int(hashes[num - 1]) if num else 0,
            )
        self._used(asked.key)
        self._put(tree, node)
        return tree.told((node,))

    def cut(self, request: RequestId, capsule: CapsuleId, tokens: int) -> SessionNote | None:
        """A capsule ends earlier than it was told to."""
        asked = self._asked.get(request)
        key = self._of_capsule.get(capsule) if asked is None else asked.key
        tree = None if key is None else self._trees.get(key)
        node = None if tree is None else tree.nodes.get(capsule)
        if key is None or tree is None or node is None:
            return None
        tree.nodes[capsule] = node = structs.replace(node, tokens=tokens)
        tree.num_changes += 1
        return tree.told((node,))

    def derived(self, capsule: CapsuleId, source: CapsuleId, tokens: int) -> SessionNote | None:
        """`capsule` is the beginning of `source`, and belongs where that does."""
        key = self._of_capsule.get(source)
        tree = None if key is None else self._trees.get(key)
        if key is None or tree is None:
            return None
        node = structs.replace(
            tree.nodes[source], capsule=capsule, tokens=tokens, created=self._clock()
        )
        self._put(tree, node)
        return tree.told((node,))

    def ended(self, request: RequestId) -> SessionKey | None:
        """The session of the request, if that was its last."""
        asked = self._asked.pop(request, None)
        if asked is None:
            return None
        tree = self._trees.get(asked.key)
        if tree is None:
            return None
        tree.running.discard(request)
        return asked.key if asked.is_last else None

    def _parent(self, asked: _Asked, hashes: Hashes, hashes_of: HashesOf) -> str:
        longest = 0
        found: list[NodeNote] = []
        for node in asked.nodes:
            num = node.prompt_blocks
            if not longest <= num <= len(hashes) or not num:
                continue
            if (
                asked.prompt_tokens <= node.prompt_tokens
                or int(hashes[num - 1]) != node.prompt_hash
            ):
                continue
            if num > longest:
                longest, found = num, []
            found.append(node)
        if len(found) <= 1:
            return found[0].capsule if found else ""
        fits = [_fit(hashes_of(CapsuleId(node.capsule)), hashes) for node in found]
        return found[max(range(len(found)), key=lambda i: (fits[i], i))].capsule

    # Sessions

    def get(self, key: SessionKey) -> SessionTree | None:
        self._forget_unused()
        return self._trees.get(key)

    def page(self, scope: Scope, after: str, most: int) -> list[SessionTree]:
        """The first `most` sessions whose names come after `after`, in order."""
        self._forget_unused()
        trees = self._of_scope.get(scope, {})
        return [trees[name] for name in nsmallest(most, (each for each in trees if each > after))]

    def newest(self, scope: Scope, tenant: str, most: int) -> list[SessionTree]:
        """The sessions of `scope`, which is one of `tenant`, that were used last; the last one first."""
        self._forget_unused()
        theirs = self._of_tenant.get(tenant)
        found = () if theirs is None else reversed(theirs.values())
        return list(islice((tree for tree in found if tree.key.scope == scope), most))

    def start_of(self, request: RequestId) -> tuple[CapsuleId | None, int]:
        """The capsule that a request under way continues, and the length of its prompt."""
        asked = self._asked.get(request)
        return (None, 0) if asked is None else (asked.capsule, asked.prompt_tokens)

    def children(self, key: SessionKey) -> list[str]:
        trees = self._of_scope.get(key.scope, {})
        return sorted(name for name, tree in trees.items() if tree.parent == key.name)

    def budget(self, key: SessionKey, parent: str) -> str:
        """The budget of a session (new ones are below `parent`), or of the nearest above that has one."""
        tree = self._trees.get(key)
        return (tree.budget if tree is not None else "") or self.budget_above(key, parent)

    def budget_above(self, key: SessionKey, parent: str) -> str:
        """As `budget`, but for the session's own."""
        seen = {key}  # clients may name parents in a circle
        tree = self._trees.get(key)
        name = parent if tree is None else tree.parent or parent
        while name:
            key = SessionKey(key.scope, name)
            over = self._trees.get(key)
            if over is None or key in seen:
                break
            if over.budget:
                return over.budget
            seen.add(key)
            tree, name = over, over.parent
        return tree.above if tree is not None else ""

    def give(self, key: SessionKey, budget: str, *, parent: str, tenant: str) -> SessionTree:
        """A session, which may be new, is bounded from now on."""
        tree = self._used(key, parent, tenant)
        tree.budget, tree.given = budget, self._clock()
        return tree

    def fork(self, source: SessionTree, name: str, node: NodeNote, budget: str = "") -> SessionTree:
        """A session that begins with a capsule of another's."""
        key = SessionKey(source.key.scope, name)
        assert key not in self._trees, "it is there already"
        tree = self._used(key, source.key.name, source.tenant)
        if budget:
            tree.budget, tree.given = budget, self._clock()
        self._put(tree, structs.replace(node, parent="", is_root=True))
        return tree

    def close(self, key: SessionKey) -> SessionTree | None:
        """Forget a session; what it was."""
        self._closed[key] = self._clock()
        self._closed.move_to_end(key)
        if len(self._closed) > MAX_CLOSED:
            self._closed.popitem(last=False)
        tree = self._trees.get(key)
        if tree is not None:
            self._forget(tree)
        return tree

    def merge(self, note: SessionNote) -> SessionTree | None:
        """Take in another gateway's news. Returns a session that it closed.

        What was sent before a session was closed, and comes after, does not bring it back.
        """
        key = SessionKey(note.scope, note.session)
        if note.is_closed:
            return self.close(key)
        nodes = note.nodes
        is_new, closed = key not in self._trees, self._closed.get(key, -np.inf)
        if is_new and closed > self._clock() - LATE_S and note.given <= closed:
            nodes = tuple(node for node in nodes if node.created > closed)
            if not nodes:
                return None
        tree = self._used(key, note.parent, note.tenant)
        tree.above = tree.above or note.above
        if note.given > max(tree.given, closed if is_new else 0.0):
            tree.budget, tree.given = note.budget, note.given
        for node in nodes:
            self._put(tree, node)
        return None

    def notes(self) -> Iterator[SessionNote]:
        """All that is known."""
        self._forget_unused()
        return iter([tree.note() for tree in self._trees.values()])

    def _used(self, key: SessionKey, parent: str = "", tenant: str = "") -> SessionTree:
        """The session, which is there from now on and is the last one used."""
        now = self._clock()
        tree = self._trees.get(key)
        if tree is None:
            tree = self._trees[key] = SessionTree(key, now, now, tenant=tenant)
            self._of_scope.setdefault(key.scope, {})[key.name] = tree
            self._of_tenant.setdefault(tenant, OrderedDict())[key] = tree
            self._add(tree)
            self._make_room(tree)
        self._trees.move_to_end(key)
        self._of_tenant[tree.tenant].move_to_end(key)
        tree.used = now
        tree.parent = tree.parent or parent
        return tree

    def _put(self, tree: SessionTree, node: NodeNote) -> None:
        if node.capsule not in tree.nodes:
            if len(tree.nodes) >= MAX_SESSION_NODES:
                self._drop(tree, next(iter(tree.nodes)))
            self._add(tree)
        tree.nodes[node.capsule] = node
        tree.num_changes += 1
        if not node.is_root:
            self._of_capsule[node.capsule] = tree.key
        self._make_room(tree)

    def _drop(self, tree: SessionTree, capsule: str) -> None:
        del tree.nodes[capsule]
        tree.num_changes += 1
        self._unname(tree, capsule)

    def _unname(self, tree: SessionTree, capsule: str) -> None:
        if self._of_capsule.get(capsule) == tree.key:
            del self._of_capsule[capsule]
        self._remove(tree)

    def _add(self, tree: SessionTree) -> None:
        self._shares.add(tree.tenant)
        self._size += 1

    def _remove(self, tree: SessionTree) -> None:
        self._shares.remove(tree.tenant)
        self._size -= 1

    def _make_room(self, spared: SessionTree) -> None:
        while self._size > self._max_nodes:
            trees = self._of_tenant[self._shares.largest].values()
            oldest = next((t for t in trees if t is not spared), None)
            if oldest is None and len(spared.nodes) <= 1:  # it is all that its tenant has
                oldest = next((t for t in self._trees.values() if t is not spared), None)
            if oldest is not None:
                self._forget(oldest)
            elif len(spared.nodes) > 1:
                self._drop(spared, next(iter(spared.nodes)))
            else:
                return

    def _forget_unused(self) -> None:
        before = self._clock() - self._ttl_s
        unused = takewhile(lambda tree: tree.used < before, self._trees.values())
        for tree in [tree for tree in unused if not tree.running]:
            self._forget(tree)

    def _forget(self, tree: SessionTree) -> None:
        if bound := self.budget(tree.key, ""):  # it goes on to bound those below
            for name in self.children(tree.key):
                self._trees[SessionKey(tree.key.scope, name)].above = bound
        for capsule in tree.nodes:
            self._unname(tree, capsule)
        del self._trees[tree.key]
        self._remove(tree)
        theirs = self._of_tenant[tree.tenant]
        del theirs[tree.key]
        if not theirs:
            del self._of_tenant[tree.tenant]
        named = self._of_scope[tree.key.scope]
        del named[tree.key.name]
        if not named:
            del self._of_scope[tree.key.scope]

    def check(self) -> None:
        """Raises AssertionError if nodes don't add up or are too many."""
        trees = list(self._trees.values())
        assert self._size == sum(1 + len(tree.nodes) for tree in trees), "nodes don't add up"
        assert self._size <= max(self._max_nodes, 2), f"{self._size} nodes"
        theirs = [(name, t.tenant) for name, own in self._of_tenant.items() for t in own.values()]
        assert all(tenant == own for tenant, own in theirs), "a session of another tenant"
        assert len(theirs) == len(trees), "sessions don't add up"
        sizes: Counter[str] = Counter()
        for tree in trees:
            sizes[tree.tenant] += 1 + len(tree.nodes)
        self._shares.check(sizes)
        assert sum(map(len, self._of_scope.values())) == len(trees), "scopes don't add up"
        own = {c: tree.key for tree in trees for c in tree.own}
        assert own == self._of_capsule, "capsules don't add up"


def _fit(held: Hashes, wanted: Hashes) -> tuple[int, int]:
    """Leading blocks of both, and less than 0 where `held` goes on differently."""
    num = min(len(held), len(wanted))
    differs = np.flatnonzero(held[:num] != wanted[:num])
    same = int(differs[0]) if len(differs) else num
    return same, same - len(held)
