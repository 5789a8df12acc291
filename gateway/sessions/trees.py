"""The trees of sessions: the capsules that each session's requests left, and which continues which.

A fork's parent is its capsule. A prompt's is the earlier capsule of the session whose prompt it begins with,
but for the last tokens: templates end a prompt in their own way where the answer begins. Of several such
the one with the longest prompt, and of its branches the one whose text goes on as the prompt does.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from heapq import nlargest
from itertools import takewhile
from operator import attrgetter
from typing import Final, NamedTuple

import numpy as np
from msgspec import structs

from mallee.gateway.sessions.shares import Shares
from mallee.gateway.store.store import Entry
from mallee.protocol.gateways.session_notes import NodeNote, SessionHead
from mallee.protocol.hashing import NO_HASHES, Hashes
from mallee.protocol.ids import CapsuleId, RequestId, Scope

MAX_SESSION_NODES: Final = 1024
MAX_COMPARED: Final = 256  # capsules of one session, the newest, that prefixes are looked for in
END_TOKENS: Final = 16  # of a prompt, that the next turn's may not repeat
USED_S: Final = 5.0  # a session is stored so often at most because it was used
TICK_S: Final = 1e-3  # what is later than something else is later by so much at least

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
    above: str = ""  # the same of a session above it, which may be over
    nodes: dict[str, NodeNote] = field(default_factory=dict)  # by capsule, oldest first
    running: set[RequestId] = field(default_factory=set)  # here
    num_changes: int = 0  # of `nodes`
    entry: Entry[SessionHead] | None = None  # as it is stored, as far as is known
    is_whole: bool = False  # all nodes that were stored when it was read last are here

    @property
    def last(self) -> NodeNote | None:
        """The newest capsule."""
        return next(reversed(self.nodes.values()), None)

    @property
    def own(self) -> list[CapsuleId]:
        """The capsules of the session itself."""
        return [CapsuleId(node.capsule) for node in self.nodes.values() if not node.is_root]

    @property
    def bound(self) -> str:
        """The name of the budget that bounds it, its own or that of one above, as far as is known."""
        return self.budget or self.above

    def head(self, gateway: str, keep_s: float) -> SessionHead:
        """As `gateway`, which uses it, has to store it; its nodes are to be put anew after `keep_s`."""
        stored = None if self.entry is None else self.entry.value
        is_due = stored is None or self.used - stored.kept >= keep_s
        return SessionHead(
            parent=self.parent,
            tenant=self.tenant,
            created=self.created,
            used=self.used,
            gateway=gateway if stored is None or stored.gateway == gateway else "",
            kept=self.used if stored is None or is_due else stored.kept,
            budget=self.budget,
            given=self.given,
            above=self.above,
        )

    def is_due(self, head: SessionHead) -> bool:
        """Whether that is to be stored now."""
        if self.entry is None:
            return True
        stored = self.entry.value
        is_used = head.used - stored.used >= USED_S
        return is_used or structs.replace(head, used=stored.used, kept=stored.kept) != stored


class _Asked(NamedTuple):
    """A request under way. `nodes`: those of its session, and of that session's parent, when it began.

    Or as they were when those of other gateways had been read.
    """

    key: SessionKey
    capsule: CapsuleId | None  # that it continues
    prompt_tokens: int
    is_last: bool
    nodes: tuple[NodeNote, ...]


class SharedPrefix(NamedTuple):
    """Tokens with which the prompts of several requests begin, and the capsules that those left."""

    tokens: int
    capsules: list[str]


class LeftNode(NamedTuple):
    """A node that is new, or has changed, of a session."""

    key: SessionKey
    node: NodeNote


class SessionTrees:
    """The sessions that one gateway knows. At most `max_nodes` of them and their capsules.

    Beyond that the tenant with the most loses the session that it used longest ago: `on_evicted`. A session
    loses the oldest of its capsules: `on_dropped`. Without use for `ttl_s` it is forgotten. `clock` gives
    seconds since the epoch.
    """

    def __init__(
        self,
        *,
        max_nodes: int,
        ttl_s: float,
        block_size: int,
        clock: Callable[[], float],
        on_evicted: Callable[[SessionTree], None] = lambda tree: None,
        on_dropped: Callable[[SessionTree, str], None] = lambda tree, capsule: None,
    ) -> None:
        self._max_nodes = max_nodes
        self._on_evicted = on_evicted
        self._on_dropped = on_dropped
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
    ) -> SessionTree:
        """A request of a session begins."""
        tree = self._used(key, parent, tenant)
        tree.running.add(request)
        self._asked[request] = _Asked(key, capsule, prompt_tokens, is_last, self._line(tree))
        return tree

    def caught_up(self, request: RequestId) -> None:
        """Its session, and that session's parent, have been read since it began."""
        asked = self._asked.get(request)
        tree = None if asked is None else self._trees.get(asked.key)
        if asked is not None and tree is not None:
            self._asked[request] = asked._replace(nodes=self._line(tree))

    def _line(self, tree: SessionTree) -> tuple[NodeNote, ...]:
        """The nodes among which parents of a session's are found."""
        above = self._trees.get(SessionKey(tree.key.scope, tree.parent)) if tree.parent else None
        return (*(above.nodes.values() if above else ()), *tree.nodes.values())

    def left(
        self,
        request: RequestId,
        capsule: CapsuleId,
        tokens: int,
        hashes: Hashes = NO_HASHES,
        hashes_of: HashesOf = lambda capsule: NO_HASHES,
    ) -> LeftNode | None:
        """A branch of the request left a capsule; `hashes` are of the full blocks of its prompt."""
        asked = self._asked.get(request)
        if asked is None:
            return None
        tree = self._trees.get(asked.key)
        if tree is None or request not in tree.running:
            return None  # it was closed meanwhile
        now = self._now(tree)
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
        return LeftNode(asked.key, node)

    def cut(self, request: RequestId, capsule: CapsuleId, tokens: int) -> LeftNode | None:
        """A capsule ends earlier than it was told to."""
        asked = self._asked.get(request)
        key = self._of_capsule.get(capsule) if asked is None else asked.key
        tree = None if key is None else self._trees.get(key)
        node = None if tree is None else tree.nodes.get(capsule)
        if key is None or tree is None or node is None:
            return None
        tree.nodes[capsule] = node = structs.replace(node, tokens=tokens)
        tree.num_changes += 1
        return LeftNode(key, node)

    def derived(self, capsule: CapsuleId, source: CapsuleId, tokens: int) -> LeftNode | None:
        """`capsule` is the beginning of `source`, and belongs where that does."""
        key = self._of_capsule.get(source)
        tree = None if key is None else self._trees.get(key)
        if key is None or tree is None:
            return None
        node = structs.replace(
            tree.nodes[source], capsule=capsule, tokens=tokens, created=self._now(tree)
        )
        self._put(tree, node)
        return LeftNode(key, node)

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

    def prefixes(self, tree: SessionTree, hashes_of: HashesOf) -> list[SharedPrefix]:
        """Blocks that requests without a parent in the session share, those of all before those of some."""
        alone = [each for each in tree.nodes.values() if not each.parent and not each.is_root]
        known = {
            n: hashes_of(CapsuleId(n.capsule))[: n.prompt_blocks] for n in alone[-MAX_COMPARED:]
        }
        found: list[SharedPrefix] = []
        todo = [([*known], 0)]
        for nodes, begun in todo:  # which grows
            same: dict[int, list[NodeNote]] = {}
            for node in nodes:
                if len(known[node]) > begun:
                    same.setdefault(int(known[node][begun]), []).append(node)
            for group in same.values():
                if len({node.request for node in group}) > 1:
                    num = min(_fit(known[each], known[group[0]])[0] for each in group)
                    capsules = [node.capsule for node in group]
                    found.append(SharedPrefix(num * self._block_size, capsules))
                    todo.append((group, num))
        return found

    # Sessions

    def get(self, key: SessionKey) -> SessionTree | None:
        self._forget_unused()
        return self._trees.get(key)

    def newest(self, scope: Scope, tenant: str, most: int) -> list[SessionTree]:
        """The sessions of `scope`, which is one of `tenant`, that were used last; the last one first."""
        self._forget_unused()
        theirs = self._of_tenant.get(tenant)
        found = () if theirs is None else (t for t in theirs.values() if t.key.scope == scope)
        return nlargest(most, found, key=attrgetter("used"))

    def of(self, scope: Scope) -> list[SessionTree]:
        self._forget_unused()
        return list(self._of_scope.get(scope, {}).values())

    def running(self) -> list[SessionKey]:
        """The sessions that run here."""
        return [tree.key for tree in self._trees.values() if tree.running]

    def start_of(self, request: RequestId) -> tuple[CapsuleId | None, int]:
        """The capsule that a request under way continues, and the length of its prompt."""
        asked = self._asked.get(request)
        return (None, 0) if asked is None else (asked.capsule, asked.prompt_tokens)

    def children(self, key: SessionKey) -> list[str]:
        trees = self._of_scope.get(key.scope, {})
        return sorted(name for name, tree in trees.items() if tree.parent == key.name)

    def give(self, key: SessionKey, budget: str, *, parent: str, tenant: str) -> None:
        """A session, which may be new, is bounded from now on."""
        tree = self._used(key, parent, tenant)
        tree.budget, tree.given = budget, max(self._clock(), tree.given + TICK_S)

    def adopt(self, key: SessionKey, entry: Entry[SessionHead]) -> SessionTree:
        """The session as it is stored, with what is only known here."""
        head, tree = entry.value, self._trees.get(key)
        if tree is None:
            tree = self._begin(SessionTree(key, head.created, head.used, tenant=head.tenant))
            self._trees.move_to_end(key, last=False)  # a copy alone: it goes first
            self._of_tenant[tree.tenant].move_to_end(key, last=False)
        elif tree.entry == entry:
            return tree
        tree.entry = entry
        tree.created = min(tree.created, head.created)
        tree.used = max(tree.used, head.used)
        tree.parent = head.parent or tree.parent
        tree.above = head.above or tree.above
        if head.given >= tree.given:
            tree.budget, tree.given = head.budget, head.given
        return tree

    def fork(self, key: SessionKey, entry: Entry[SessionHead], node: NodeNote) -> SessionTree:
        """A session that begins with a capsule of another's."""
        tree = self.adopt(key, entry)
        tree.is_whole = True
        self._used(key)
        self._put(tree, structs.replace(node, parent="", is_root=True))
        return tree

    def take(self, tree: SessionTree, nodes: Iterable[NodeNote]) -> None:
        """Nodes of a session as they are stored."""
        found = {node.capsule: node for node in nodes}
        ordered = sorted((found | tree.nodes).values(), key=attrgetter("created"))
        for node in ordered[:-MAX_SESSION_NODES]:
            if node.capsule in tree.nodes:
                self._drop(tree, node.capsule)
            else:
                self._on_dropped(tree, node.capsule)
            found.pop(node.capsule, None)
        for node in found.values():
            known = tree.nodes.get(node.capsule)
            if known is None or node.tokens < known.tokens:  # it was cut meanwhile
                self._put(tree, node)
        order = [node.capsule for node in ordered if node.capsule in tree.nodes]
        tree.nodes = {capsule: tree.nodes[capsule] for capsule in order}

    def close(self, key: SessionKey) -> SessionTree | None:
        """Forget a session; what it was."""
        tree = self._trees.get(key)
        if tree is not None:
            self._forget(tree)
        return tree

    def _used(self, key: SessionKey, parent: str = "", tenant: str = "") -> SessionTree:
        """The session, which is there from now on and is the last one used."""
        now = self._clock()
        tree = self._trees.get(key) or self._begin(SessionTree(key, now, now, tenant=tenant))
        self._trees.move_to_end(key)
        self._of_tenant[tree.tenant].move_to_end(key)
        tree.used = max(tree.used, now)
        if parent and not tree.parent:
            over = self._trees.get(SessionKey(key.scope, parent))
            tree.parent, tree.above = parent, tree.above or ("" if over is None else over.bound)
        return tree

    def _begin(self, tree: SessionTree) -> SessionTree:
        self._trees[tree.key] = tree
        self._of_scope.setdefault(tree.key.scope, {})[tree.key.name] = tree
        self._of_tenant.setdefault(tree.tenant, OrderedDict())[tree.key] = tree
        self._add(tree)
        self._make_room(tree)
        return tree

    def _now(self, tree: SessionTree) -> float:
        """Not before the session was created, by another gateway's clock."""
        return max(self._clock(), tree.created)

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
        self._on_dropped(tree, capsule)

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
                self._on_evicted(oldest)
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
        if tree.bound:  # it goes on to bound those below
            for name in self.children(tree.key):
                self._trees[SessionKey(tree.key.scope, name)].above = tree.bound
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
