"""A trace before it is replayed: its span, rate and shared prefixes, and whether it can be what it says."""

from typing import Final, NamedTuple

from mallee.traces.workload import Workload

_UNITS: Final = {"mooncake": "milliseconds", "agentic": "milliseconds", "bailian": "seconds"}
_FEW: Final = 10  # requests, whose rate tells nothing of the unit


class Preview(NamedTuple):
    """A trace as its replay will see it. `seen_share`: of prompts' blocks, those of earlier prompts."""

    workload: Workload
    num: int
    span_s: float
    mean_tokens: float
    seen_share: float
    has_ids: bool
    has_sessions: bool

    def line(self, speedup: float, concurrency: int) -> str:
        """The trace in a line."""
        name, ids = self.workload.name, self.workload.id_tokens
        if concurrency:
            when = f"{concurrency} at a time"
        else:
            span_s = self.span_s / speedup
            when = f"over {_span(span_s)}" + (f", {self.num / span_s:,.3g}/s" if span_s else "")
            if (unit := _UNITS.get(self.workload.kind)) is not None:
                when += f" (timestamps read as {unit})"
        seen = f"{self.seen_share:.0%} of them seen before, in ids of {ids} tokens"
        if not self.has_ids:
            seen = "none with hash_ids: no cache can find anything"
        return f"{name}: {self.num:,} requests {when}; {self.mean_tokens:,.0f} prompt tokens each, {seen}"

    def doubt(self, speedup: float, concurrency: int) -> str:
        """A sentence if the unit of the timestamps looks wrong, else "".

        No fleet is asked a thousand times a second, or once in an hour.
        """
        unit = _UNITS.get(self.workload.kind)
        if unit is None or concurrency or self.num < _FEW or not self.span_s:
            return ""
        rate = self.num / self.span_s * speedup
        if rate > 1000.0:
            coarse = "; if the timestamps are seconds, give --speedup 0.001"
            return f"{rate:,.0f} requests/s{coarse if unit == 'milliseconds' else ''}"
        if rate >= 1 / 3600:
            return ""
        finer = "milliseconds, give --speedup 1000"
        if unit == "milliseconds":
            finer = "microseconds, give --speedup 1000, if nanoseconds, --speedup 1000000"
        return f"a request in {_span(1 / rate)}; if the timestamps are {finer}"


def preview(workload: Workload) -> Preview:
    """Read the whole trace once. Raises CodecError naming the fault if its ids are no prefix tree."""
    from mallee.synth.core.prefix_tree import require_tree  # numba
    from mallee.traces.trace import trace_of

    trace = trace_of(workload)
    require_tree(workload, trace)
    num, blocks = len(trace), len(trace.blocks)
    return Preview(
        workload=workload,
        num=num,
        span_s=float(trace.arrival_s[-1] - trace.arrival_s[0]) if num else 0.0,
        mean_tokens=float(trace.input_tokens.mean()) if num else 0.0,
        seen_share=1 - trace.num_blocks / blocks if blocks else 0.0,
        has_ids=bool(blocks),
        has_sessions=any(trace.sessions),
    )


def _span(seconds: float) -> str:
    for name, length in (("days", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:,.1f} {name}"
    return f"{seconds:,.3g} s"
