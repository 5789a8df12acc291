"""The changes of a scope's sessions, look by look, for those who watch them."""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple, TypeAlias

from mallee.api.text.tokenizer import Tokenizer
from mallee.gateway.gateway import Gateway
from mallee.gateway.requests.requests import OpenBranch
from mallee.gateway.sessions.trees import SessionTree
from mallee.protocol.gateways.session_notes import NodeNote
from mallee.protocol.ids import RequestId, Scope

MAX_SESSIONS: Final = 256  # that are watched: those used last
MAX_TAILS: Final = 128  # of one look: a few milliseconds of the event loop
Running: TypeAlias = Mapping[str, list[dict[str, Any]]]
"""Branches under way by the name of their session, as they are told."""

NOWHERE: Final[Running] = {}
_NOTHING: Final[Mapping[str, NodeNote]] = {}


class Look:
    """One look at the branches that run at this gateway."""

    def __init__(self, gateway: Gateway, tokenizer: Tokenizer, scope: Scope) -> None:
        self._gateway = gateway
        self._tokenizer = tokenizer
        self._scope = scope
        self._num_tails = 0

    def branches(self, tree: SessionTree) -> list[dict[str, Any]]:
        """Those of a session."""
        return [body for request in sorted(tree.running) for body in self._of(request)]

    def _of(self, request: RequestId) -> list[dict[str, Any]]:
        capsule, prompt_tokens = self._gateway.sessions.trees.start_of(request)
        return [
            {
                "request": request,
                "capsule": capsule,
                "prompt_tokens": prompt_tokens,
                **self._branch(each),
            }
            for each in self._gateway.requests.open_branches(request, self._scope)
        ]

    def _branch(self, branch: OpenBranch) -> dict[str, Any]:
        return {
            "branch": branch.branch,
            "state": branch.state,
            "tokens": branch.num_tokens,
            "tail": self._tail(branch),
        }

    def _tail(self, branch: OpenBranch) -> str:
        if not branch.tail or self._num_tails >= MAX_TAILS:
            return ""
        self._num_tails += 1
        text = self._tokenizer.decode(list(branch.tail), skip_special_tokens=True)
        return text.lstrip("\ufffd")  # it may begin within a character


class SessionWatch:
    """Tells one watcher what has changed since it looked last."""

    def __init__(self, gateway: Gateway, tokenizer: Tokenizer, scope: Scope, tenant: str) -> None:
        self._gateway = gateway
        self._tokenizer = tokenizer
        self._scope = scope
        self._tenant = tenant
        self._told: dict[str, _Told] = {}

    def changes(self, elsewhere: Running = NOWHERE) -> dict[str, Any] | None:
        """The body of an event; None if nothing has changed. The first one has all that there is.

        `elsewhere`: branches that run at other gateways.
        """
        look = Look(self._gateway, self._tokenizer, self._scope)
        trees = self._gateway.sessions.trees.newest(self._scope, self._tenant, MAX_SESSIONS)
        names = {tree.key.name for tree in trees}
        gone = [name for name in self._told if name not in names]
        for name in gone:
            del self._told[name]
        found = (self._changed(tree, look, elsewhere) for tree in reversed(trees))
        changed = [body for body in found if body is not None]
        if not changed and not gone:
            return None
        return {"object": "watch.sessions", "sessions": changed, "gone": gone}

    def _changed(self, tree: SessionTree, look: Look, elsewhere: Running) -> dict[str, Any] | None:
        branches = [*look.branches(tree), *elsewhere.get(tree.key.name, ())]
        told = self._told.get(tree.key.name)
        if told is not None and told.tree is not tree:
            told = None  # it is another of that name
        is_same = told is not None and told.num_changes == tree.num_changes
        if told is not None and is_same and told.branches == branches:
            return None
        known = _NOTHING if told is None else told.nodes
        nodes = known if is_same else dict(tree.nodes)
        changed = [] if is_same else [n for name, n in nodes.items() if known.get(name) is not n]
        gone = [] if is_same else [name for name in known if name not in nodes]
        self._told[tree.key.name] = _Told(tree, tree.num_changes, nodes, branches)
        return {
            "id": tree.key.name,
            "parent": tree.parent or None,
            "created": int(tree.created),
            "last_used": int(tree.used),
            "is_new": told is None,
            "nodes": [_node(each) for each in changed],
            "prefixes": None if is_same else self._prefixes(tree),
            "gone": gone,
            "running": branches,
        }

    def _prefixes(self, tree: SessionTree) -> list[dict[str, Any]]:
        found = self._gateway.sessions.trees.prefixes(tree, self._gateway.capsules.hashes)
        return [each._asdict() for each in found]


class _Told(NamedTuple):
    """A session as a watcher knows it."""

    tree: SessionTree
    num_changes: int
    nodes: Mapping[str, NodeNote]
    branches: list[dict[str, Any]]


def _node(node: NodeNote) -> dict[str, Any]:
    return {
        "capsule": node.capsule,
        "parent": node.parent or None,
        "request": node.request,
        "tokens": node.tokens,
        "prompt_tokens": node.prompt_tokens,
        "created": int(node.created),
        "is_root": node.is_root,
    }
