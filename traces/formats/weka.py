"""Weka's sessions (kv-cache-tester, aiperf's `weka_trace`), unrolled to `sessions` and written.

A session is a JSON object, and its ids are its own. Written, sub-agents are calls of their session, each
call takes as long as the one that waits for it tells, and text that sessions share is lost.
"""

from collections.abc import Iterable, Iterator
from typing import Any, Final

import msgspec

from mallee.protocol.workload import WorkloadRow
from mallee.traces.files.lines import TraceFile
from mallee.traces.workload import Runs, compact
from mallee.traces.written import Written

_object: Final = msgspec.json.Decoder(dict[str, Any])


def unroll_weka(file: TraceFile, number: int, line: bytes) -> Iterator[dict[str, Any]]:
    """The session in the form that `sessions` reads."""
    session = file.decode(number, line, _object)
    try:
        entries = [_unrolled(each, 0.0) for each in session["requests"]]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise file.bad(number, f"no calls of Weka's form: {error!r}", "requests") from error
    yield session | {"requests": entries}


def _unrolled(entry: dict[str, Any], begin_s: float) -> dict[str, Any]:
    """A call or a sub-agent, in what begins at `begin_s`."""
    t = (
        entry["t"] - begin_s if entry["t"] >= begin_s else entry["t"]
    )  # older files count from there
    if entry["type"] == "subagent":
        calls = [_unrolled(call, entry["t"]) for call in entry["requests"]]
        return {**entry, "k": "sub", "t": t, "requests": calls}
    ids = compact(entry.get("hash_ids") or [])
    runs = ids.runs if isinstance(ids, Runs) else [(each, 1) for each in ids]
    return {**entry, "k": "r", "t": t, "h": runs, "api": max(0.0, entry.get("api_time") or 0.0)}


def weka_sessions(
    rows: Iterable[WorkloadRow], id_tokens: int, written: Written
) -> Iterator[dict[str, Any]]:
    """Sessions of rows by arrival; a row without one is one. Holds all rows."""
    sessions: dict[str, list[WorkloadRow]] = {}
    ends_ms: dict[str | None, float] = {}  # by request, as those that wait for it tell
    for row in rows:
        own = sessions.setdefault(row.session_id or f"request {row.request_id}", [])
        before = own[-1].request_id if own else None
        written.lost_waits += sum(other != before for other in row.wait_for)
        if before in row.wait_for:
            ends_ms[before] = row.timestamp - row.tool_wait_ms
        written.flattened += row.fork_of is not None
        written.copies += row.branches - 1
        own += [row] * row.branches
    head = {"models": ["model"], "block_size": id_tokens, "hash_id_scope": "local"}
    for name, own in sessions.items():
        ids: dict[int, int] = {}
        calls = [
            {
                "t": (row.timestamp - own[0].timestamp) / 1000,
                "type": "n",
                "model": "model",
                "in": row.input_length,
                "out": max(1, row.output_length),
                "hash_ids": [ids.setdefault(each, len(ids)) for each in row.hash_ids],
                "api_time": max(0.0, ends_ms.get(row.request_id, 0.0) - row.timestamp) / 1000,
                "think_time": row.tool_wait_ms / 1000,
            }
            for row in own
        ]
        yield {"id": name, **head, "requests": calls}
