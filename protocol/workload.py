"""Rows of a workload trace: arrivals, lengths, and ids of blocks.

The base fields are Mooncake's, the rest are the agentic extension, absent in plain traces. One JSON
object a line.

    timestamp      ms; the recorded (or, in a generated trace, the open-loop) arrival
    input_length   tokens of the whole prompt, also of a fork
    output_length  tokens of each answer; 0 on a row that others fork: only its prompt is computed
    hash_ids       blocks of the prompt from the first token on, prefix-chained: equal id, equal text up
                   to the block's end. The last may be a partial block's. Tokens beyond them are text
                   that no other row has. How many tokens an id stands for is not in the row (512 in
                   Mooncake's files)
    session_id     rows of one client's tree
    request_id     the row's name, for others to refer to
    wait_for       rows that have to end before this one starts: all of them, at any timestamp
    tool_wait_ms   from the last one's end until this row starts: a tool's time, or a person's
    branches       answers to the one prompt (of a fork: forks, each with text of its own)
    prefix_reset   the row drops its session's context and begins anew, as after a compaction: it goes on
                   from no earlier row, though it may share system text with them
    fork_of        the row goes on from the end (prompt and answer) of that row, whose state it forks. It
                   is one of `wait_for` too, so that a reader without this field sees a plain row
    cls            kind of request, for reports; left out where it follows from the other fields
"""

import msgspec


class WorkloadRow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One request of a trace; the module describes the fields."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()
    session_id: str | None = None
    request_id: str | None = None
    wait_for: tuple[str, ...] = ()
    tool_wait_ms: float = 0.0
    branches: int = 1
    prefix_reset: bool = False
    fork_of: str | None = None
    cls: str | None = None
