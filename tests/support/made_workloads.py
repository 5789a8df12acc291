"""Synthetic workloads for use without a trace."""

from collections.abc import Iterator
from typing import Final

import numpy as np

from mallee.traces.workload import Request, Runs, Workload

ID_TOKENS: Final = 512
FORK_ID_TOKENS: Final = 16


def sessions_workload(requests: int, *, seed: int, per_s: float = 3.4) -> Workload:
    """Sessions that begin with one of eight prompts and grow turn by turn, `per_s` requests a second.

    Turns arrive at their times, whether or not those before have ended. Lengths are about Mooncake's.
    """

    def read() -> Iterator[Request]:
        made = sorted(_turns(requests, seed, per_s), key=lambda r: (r.arrival_s, r.number))
        for number, turn in enumerate(made[:requests]):
            yield Request(
                number,
                turn.arrival_s,
                turn.ids,
                turn.input_tokens,
                turn.output_tokens,
                turn.session,
            )

    return Workload("made-up sessions", ID_TOKENS, read, kind="mooncake", note=f"seed {seed}")


def _turns(requests: int, seed: int, per_s: float) -> Iterator[Request]:
    """Turns of more sessions than are needed, session by session."""
    rng = np.random.default_rng(seed)
    mean_turns, made, next_id = 5.0, 0, 1000
    begin_s = 0.0
    while made < 2 * requests:
        begin_s += float(rng.exponential(mean_turns / per_s))
        prompt = int(rng.integers(8))
        runs = [(prompt * 16, 4 + prompt)]
        at_s, session = begin_s, f"s{made}"
        for _ in range(int(rng.geometric(1 / mean_turns))):
            more = int(rng.geometric(0.2))
            runs = [*runs, (next_id, more)]
            next_id += more
            ids = Runs(runs)
            tokens = len(ids) * ID_TOKENS - int(rng.integers(ID_TOKENS))
            output = 16 + int(rng.exponential(330.0))
            yield Request(made, at_s, ids, tokens, output, session)
            made += 1
            at_s += 4.0 + float(rng.exponential(20.0))


def fan_out_workload(
    children: int,
    *,
    prefix_tokens: int,
    suffix_tokens: int,
    output_tokens: int,
    as_forks: bool,
    is_warm: bool = True,
) -> Workload:
    """One prompt, then `children` that continue it at once, each with text and an answer of its own.

    As forks of its capsule (one request with a branch a child), or as plain requests that bring the
    whole text. Children are of class "child", and if `is_warm` they wait for the prompt to be computed.
    """
    size = FORK_ID_TOKENS
    num_ids = prefix_tokens // size
    root = Runs([(0, num_ids)])

    def read() -> Iterator[Request]:
        yield Request(0, 0.0, root, prefix_tokens, 0, cls="parent", num_children=int(as_forks))
        if as_forks:
            tokens = suffix_tokens, output_tokens
            yield Request(1, 0.0, (), *tokens, cls="child", branches=children, parent=0)
            return
        for child in range(children):
            own = (num_ids * (child + 2), -(-suffix_tokens // size))
            yield Request(
                1 + child,
                0.0,
                Runs([(0, num_ids), own]),
                num_ids * size + suffix_tokens,
                output_tokens,
                cls="child",
                wait_for=(0,) if is_warm else (),
            )

    name = f"fan-out of {children}"
    note = f"over {prefix_tokens} tokens"
    return Workload(name, size, read, kind="fan-out", note=note, has_forks=as_forks)
