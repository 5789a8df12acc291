"""Rows of a workload trace: what arrived when, how long it was, which blocks it named.

The base fields are Mooncake's (timestamp ms, lengths in tokens, prefix-chained block ids); the rest
are the agentic extension (which row waits for which, for how long a tool ran), absent in plain
traces. One JSON object a line.
"""

import msgspec

from mallee.protocol.errors import CodecError


class WorkloadRow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request of a trace. `hash_ids` name its blocks from the first on; equal id, equal prefix."""

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


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(WorkloadRow)


def encode_row(row: WorkloadRow) -> bytes:
    """One JSON line, without the newline; fields at their default are left out."""
    return _encoder.encode(row)


def decode_row(line: bytes | str) -> WorkloadRow:
    """Raises CodecError naming the field that is wrong."""
    try:
        row = _decoder.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError) as e:
        raise CodecError(f"not a workload row: {e}") from e
    if row.input_length < 0 or row.output_length < 0:
        raise CodecError(
            f"not a workload row: lengths {row.input_length}, {row.output_length} must be >= 0"
        )
    return row
