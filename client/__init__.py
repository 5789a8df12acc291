"""The Python SDK: prefill once, fork many, stream the branches side by side.

Needs only httpx, msgspec and rich. Must not know torch, ray, numba or anything behind the HTTP API.

    from mallee import Mallee

    with Mallee("http://127.0.0.1:8000") as client:
        with client.prefill(messages=[{"role": "system", "content": "A long document ..."}]) as capsule:
            for branch in capsule.ask(["Question one?", "Question two?"]):
                print(branch.worker, branch.ttft_ms, branch.text)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mallee.client.aio import AsyncBranch, AsyncBranches, AsyncCapsule, AsyncMallee, AsyncSession
from mallee.client.calls import Budget, StopWhen
from mallee.client.errors import (
    ApiError,
    ConnectionFailed,
    JournalFailed,
    NoCapsule,
    NotParsed,
    StreamBroken,
    Timeout,
    ToolFailed,
    ToolTimeout,
)
from mallee.client.results import BranchEvent, ToolCall, Usage
from mallee.client.sessions import SessionTree
from mallee.client.sync import Branch, Branches, Capsule, Mallee, Session
from mallee.protocol.api.capsules import CapsuleCount, RequestLife
from mallee.protocol.api.capsules import NewCapsule as CapsuleData
from mallee.protocol.api.operator import Decisions, Worker
from mallee.protocol.api.sessions import BoundSession, SessionBudget, SessionClosed, SessionNode
from mallee.protocol.api.sessions import Session as SessionData
from mallee.protocol.errors import (
    BadRequest,
    BudgetSpent,
    CapsuleLost,
    CapsulesFull,
    CapsuleStale,
    ContextLengthExceeded,
    CorruptExport,
    DeadlineExceeded,
    Forbidden,
    GrammarFailed,
    GraphContextExceeded,
    IncompatibleCapsule,
    InvalidGraph,
    InvalidParameter,
    KVMemoryExceeded,
    LookupIncomplete,
    MalleeError,
    NotFound,
    NoWorker,
    Overloaded,
    QueueFull,
    QuotaExceeded,
    QuotaTooSmall,
    SlowReader,
    TenantQueueFull,
    TierFull,
    Unauthorized,
    Unavailable,
    UnknownBranch,
    UnknownCapsule,
    UnknownModel,
    WorkerLost,
)

if TYPE_CHECKING:  # graphs cost 30 ms to import, policies as much: loaded by those that use them
    from mallee.client.graphs.blocking import GraphRun
    from mallee.client.graphs.builder import Graph
    from mallee.client.graphs.results import GraphEvent, GraphNode, GraphResult
    from mallee.client.graphs.running import AsyncGraphRun
    from mallee.graphs.nodes import Handle
    from mallee.search.policies.depth_first import DepthFirst
    from mallee.search.policies.levels import Beam, BreadthFirst, DiverseTrees
    from mallee.search.policies.mcts import Mcts
    from mallee.search.policies.sampling import BestOfN, SelfConsistency
    from mallee.search.policy import SearchBudget
    from mallee.search.results import SearchResult
    from mallee.search.scores import Verifier

__all__ = [
    "ApiError",
    "AsyncBranch",
    "AsyncBranches",
    "AsyncCapsule",
    "AsyncGraphRun",
    "AsyncMallee",
    "AsyncSession",
    "BadRequest",
    "Beam",
    "BestOfN",
    "BoundSession",
    "Branch",
    "BranchEvent",
    "Branches",
    "BreadthFirst",
    "Budget",
    "BudgetSpent",
    "Capsule",
    "CapsuleCount",
    "CapsuleData",
    "CapsuleLost",
    "CapsuleStale",
    "CapsulesFull",
    "ConnectionFailed",
    "ContextLengthExceeded",
    "CorruptExport",
    "DeadlineExceeded",
    "Decisions",
    "DepthFirst",
    "DiverseTrees",
    "Forbidden",
    "GrammarFailed",
    "Graph",
    "GraphContextExceeded",
    "GraphEvent",
    "GraphNode",
    "GraphResult",
    "GraphRun",
    "Handle",
    "IncompatibleCapsule",
    "InvalidGraph",
    "InvalidParameter",
    "JournalFailed",
    "KVMemoryExceeded",
    "LookupIncomplete",
    "Mallee",
    "MalleeError",
    "Mcts",
    "NoCapsule",
    "NoWorker",
    "NotFound",
    "NotParsed",
    "Overloaded",
    "QueueFull",
    "QuotaExceeded",
    "QuotaTooSmall",
    "RequestLife",
    "SearchBudget",
    "SearchResult",
    "SelfConsistency",
    "Session",
    "SessionBudget",
    "SessionClosed",
    "SessionData",
    "SessionNode",
    "SessionTree",
    "SlowReader",
    "StopWhen",
    "StreamBroken",
    "TenantQueueFull",
    "TierFull",
    "Timeout",
    "ToolCall",
    "ToolFailed",
    "ToolTimeout",
    "Unauthorized",
    "Unavailable",
    "UnknownBranch",
    "UnknownCapsule",
    "UnknownModel",
    "Usage",
    "Verifier",
    "Worker",
    "WorkerLost",
]

_LATE = {
    "AsyncGraphRun": "client.graphs.running",
    "Beam": "search.policies.levels",
    "BestOfN": "search.policies.sampling",
    "BreadthFirst": "search.policies.levels",
    "DepthFirst": "search.policies.depth_first",
    "DiverseTrees": "search.policies.levels",
    "Graph": "client.graphs.builder",
    "GraphEvent": "client.graphs.results",
    "GraphNode": "client.graphs.results",
    "GraphResult": "client.graphs.results",
    "GraphRun": "client.graphs.blocking",
    "Handle": "graphs.nodes",
    "Mcts": "search.policies.mcts",
    "SearchBudget": "search.policy",
    "SearchResult": "search.results",
    "SelfConsistency": "search.policies.sampling",
    "Verifier": "search.scores",
}


def __getattr__(name: str) -> Any:
    """A name of graphs or searches, when it is asked for."""
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"mallee.{_LATE[name]}"), name)
