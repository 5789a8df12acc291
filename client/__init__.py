"""The Python SDK: prefill once, fork many, stream the branches side by side.

Needs only httpx, msgspec and rich. Must not know torch, ray, numba or anything behind the HTTP API.

    from mallee.client import Mallee

    with Mallee("http://127.0.0.1:8000") as client:
        with client.prefill("A long document ...") as capsule:
            for branch in capsule.fork([" Question one?", " Question two?"]).wait():
                print(branch.worker, branch.ttft_ms, branch.text)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mallee.client.aio import AsyncBranch, AsyncBranches, AsyncCapsule, AsyncMallee, AsyncSession
from mallee.client.calls import Budget
from mallee.client.errors import (
    ApiError,
    ConnectionFailed,
    JournalFailed,
    NoCapsule,
    StreamBroken,
    ToolFailed,
    ToolTimeout,
)
from mallee.client.results import BranchEvent, CapsuleCount, CapsuleData, ToolCall, Usage
from mallee.client.sessions import (
    BoundSession,
    ClosedSession,
    SessionBudget,
    SessionData,
    SessionNode,
    SessionTree,
)
from mallee.client.sync import Branch, Branches, Capsule, Mallee, Session
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

if TYPE_CHECKING:  # graphs cost 30 ms to import: loaded by those that use them
    from mallee.client.graphs.blocking import GraphRun
    from mallee.client.graphs.builder import Graph
    from mallee.client.graphs.results import GraphEvent, GraphNode, GraphResult
    from mallee.client.graphs.running import AsyncGraphRun
    from mallee.graphs.nodes import Handle

__all__ = [
    "ApiError",
    "AsyncBranch",
    "AsyncBranches",
    "AsyncCapsule",
    "AsyncGraphRun",
    "AsyncMallee",
    "AsyncSession",
    "BadRequest",
    "BoundSession",
    "Branch",
    "BranchEvent",
    "Branches",
    "Budget",
    "BudgetSpent",
    "Capsule",
    "CapsuleCount",
    "CapsuleData",
    "CapsuleLost",
    "CapsuleStale",
    "CapsulesFull",
    "ClosedSession",
    "ConnectionFailed",
    "ContextLengthExceeded",
    "CorruptExport",
    "DeadlineExceeded",
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
    "NoCapsule",
    "NoWorker",
    "NotFound",
    "Overloaded",
    "QueueFull",
    "QuotaExceeded",
    "QuotaTooSmall",
    "Session",
    "SessionBudget",
    "SessionData",
    "SessionNode",
    "SessionTree",
    "SlowReader",
    "StreamBroken",
    "TenantQueueFull",
    "TierFull",
    "ToolCall",
    "ToolFailed",
    "ToolTimeout",
    "Unauthorized",
    "Unavailable",
    "UnknownBranch",
    "UnknownCapsule",
    "UnknownModel",
    "Usage",
    "WorkerLost",
]

_LATE = {
    "AsyncGraphRun": "client.graphs.running",
    "Graph": "client.graphs.builder",
    "GraphEvent": "client.graphs.results",
    "GraphNode": "client.graphs.results",
    "GraphResult": "client.graphs.results",
    "GraphRun": "client.graphs.blocking",
    "Handle": "graphs.nodes",
}


def __getattr__(name: str) -> Any:
    """A name of graphs, when it is asked for."""
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"mallee.{_LATE[name]}"), name)
