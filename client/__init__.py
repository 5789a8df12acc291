"""The Python SDK: prefill once, fork many, stream the branches side by side.

Needs only httpx, msgspec and rich. Must not know torch, ray, numba or anything behind the HTTP API.

    from mallee.client import Mallee

    with Mallee("http://127.0.0.1:8000") as client:
        with client.prefill("A long document ...") as capsule:
            for branch in capsule.fork([" Question one?", " Question two?"]).wait():
                print(branch.worker, branch.ttft_ms, branch.text)
"""

from mallee.client.aio import AsyncBranch, AsyncBranches, AsyncCapsule, AsyncMallee
from mallee.client.errors import ApiError, ConnectionFailed, NoCapsule, StreamBroken
from mallee.client.results import BranchEvent, CapsuleCount, CapsuleData, ToolCall, Usage
from mallee.client.sessions import ClosedSession, SessionData, SessionFork, SessionNode, SessionTree
from mallee.client.sync import Branch, Branches, Capsule, Mallee
from mallee.protocol.errors import (
    BadRequest,
    CapsuleLost,
    CapsulesFull,
    CapsuleStale,
    ContextLengthExceeded,
    CorruptExport,
    DeadlineExceeded,
    Forbidden,
    GrammarFailed,
    IncompatibleCapsule,
    InvalidParameter,
    KVMemoryExceeded,
    MalleeError,
    NotFound,
    NoWorker,
    Overloaded,
    QueueFull,
    QuotaExceeded,
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

__all__ = [
    "ApiError",
    "AsyncBranch",
    "AsyncBranches",
    "AsyncCapsule",
    "AsyncMallee",
    "BadRequest",
    "Branch",
    "BranchEvent",
    "Branches",
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
    "IncompatibleCapsule",
    "InvalidParameter",
    "KVMemoryExceeded",
    "Mallee",
    "MalleeError",
    "NoCapsule",
    "NoWorker",
    "NotFound",
    "Overloaded",
    "QueueFull",
    "QuotaExceeded",
    "SessionData",
    "SessionFork",
    "SessionNode",
    "SessionTree",
    "SlowReader",
    "StreamBroken",
    "TenantQueueFull",
    "TierFull",
    "ToolCall",
    "Unauthorized",
    "Unavailable",
    "UnknownBranch",
    "UnknownCapsule",
    "UnknownModel",
    "Usage",
    "WorkerLost",
]
