"""Trees of texts in a whole engine over a real forward pass: forks, restores, a search."""

import statistics
import time
from collections.abc import Sequence
from itertools import count
from typing import NamedTuple

import numpy as np
import torch

from bench.engine.ours import SAMPLED, Ours
from bench.gpu.shapes import Scale
from bench.gpu.steps import device_of, median_s
from bench.search.programs import Text, mcts
from mallee.protocol.ids import RequestId, capsule_id
from mallee.protocol.messages import Cancel, Fork, Limits
from mallee.worker.kv.paths import flatten
from mallee.worker.model.runner import TorchForward
from mallee.worker.records import EngineConfig
from mallee.worker.sched.policy import SchedulerConfig

MAX_STEP_TOKENS = 8192


def engine_over(
    forward: TorchForward, scale: Scale, *, has_tree: bool = True, has_cache: bool = True
) -> Ours:
    """An engine with as many answers' capsules as a search has; else blocks alone may be cached."""
    kept = scale.expansions * scale.rollouts if has_tree else 0
    scheduler = SchedulerConfig(max_step_tokens=MAX_STEP_TOKENS, max_rows=256, gang=has_tree)
    config = EngineConfig(scheduler, kept, prefix_cache=has_cache)
    return Ours(forward, config, shares_reads=has_tree)


def prompt(scale: Scale, num: int, seed: int) -> list[int]:
    draw = np.random.default_rng(seed)
    found: list[int] = draw.integers(3, scale.config.vocab_size, num).tolist()
    return found


class Forks(NamedTuple):
    """Milliseconds of the forks of one parent: of their nodes and page tables; of the engine's whole call."""

    tables_ms: float
    submit_ms: float


def forks(ours: Ours, scale: Scale) -> Forks:
    """Children of a parent: the tree's work and a page table on the device for each; then by a command."""
    capsule = ours.prefill(prompt(scale, scale.shared, 1))
    tree = ours.engine._tree
    found = ours.engine._capsules.peek(capsule)
    assert found is not None, "it was computed just now"
    node, device = found.node, device_of(ours.forward)
    assert node is not None, "it lies on the device"
    size = ours.forward.block_size

    def fork() -> torch.Tensor:
        for _ in range(scale.forks):
            tree.hold(node)
        parent = torch.from_numpy(flatten(node, size).astype(np.int32)).to(device)
        return parent.expand(scale.forks, -1).contiguous()

    times = []
    for _ in range(scale.repeats):
        times.append(median_s(device, fork, 1))
        tree.release(node, 3 * scale.forks)  # two that warm up, and one
    names = count()
    limits, suffixes = Limits(1, ignore_eos=True), (b"",) * scale.forks
    submits = []
    for _ in range(scale.repeats):
        name = f"fork{next(names)}"
        begin = time.perf_counter()
        error = ours.engine.submit(Fork(name, capsule, suffixes, limits, SAMPLED), "bench")
        submits.append(time.perf_counter() - begin)
        assert error is None, error
        ours.engine.submit(Cancel(name), "bench")
    while ours.engine.has_work:
        ours.engine.step()
    ours.release(capsule)
    return Forks(1000 * statistics.median(times), 1000 * statistics.median(submits))


def restore_ms(ours: Ours, scale: Scale) -> float:
    """Milliseconds until a capsule of the device is a branch that can draw: one command, no KV is moved."""
    capsule = ours.prefill(prompt(scale, scale.shared, 2))
    names = count()
    limits = Limits(1, ignore_eos=True)
    times = []
    for _ in range(20 * scale.repeats):
        name = f"restore{next(names)}"
        begin = time.perf_counter()
        error = ours.engine.submit(Fork(name, capsule, (b"",), limits, SAMPLED), "bench")
        times.append(time.perf_counter() - begin)
        assert error is None, error
        ours.engine.submit(Cancel(name), "bench")
    while ours.engine.has_work:
        ours.engine.step()
    ours.release(capsule)
    return 1000 * statistics.median(times)


class Replays(NamedTuple):
    """Steps of forks, and graphs that were recorded meanwhile."""

    num_captures: int
    num_replays: int
    num_eager: int


REPLAYED_FORKS = 4
"""Of one parent at a time: of many, steps read what they share together, and are eager."""


def replays(ours: Ours, scale: Scale) -> Replays:
    """As many forks of one parent as a scale has, each of which draws a few tokens."""
    capsule = ours.prefill(prompt(scale, scale.shared, 4))
    before = ours.forward.graph_stats()
    for _ in range(0, scale.forks, REPLAYED_FORKS):
        ours.fork(capsule, [[]] * REPLAYED_FORKS, 4)
    after = ours.forward.graph_stats()
    ours.release(capsule)
    return Replays(
        after.num_captures - before.num_captures,
        after.num_replays - before.num_replays,
        sum(dict(after.num_eager).values()) - sum(dict(before.num_eager).values()),
    )


class Search(NamedTuple):
    """Seconds of a search: by forks, by requests with a block cache, by requests that compute each text."""

    forked_s: float
    cached_s: float
    resent_s: float  # of all expansions, as those that were measured
    drawn: int
    resent_drawn: int  # of the measured ones
    prefilled: int  # tokens computed of prompts, by forks
    cached_prefilled: int
    resent_prefilled: int

    @property
    def speedup(self) -> float:
        return self.resent_s / self.forked_s

    @property
    def against_cache(self) -> float:
        return self.cached_s / self.forked_s


def search(forked: Ours, cached: Ours, plain: Ours, scale: Scale, seed: int = 3) -> Search:
    """The search of `bench.search`, one expansion at a time; the same texts by each engine."""
    tokens = np.array(prompt(scale, scale.shared, seed), np.uint32)
    begin = time.perf_counter()
    root = Text(tokens, forked.prefill(tokens.tolist()))
    forked_s, prefilled, drawn = time.perf_counter() - begin, len(tokens), 0
    program = mcts(
        *(root, seed),
        expansions=scale.expansions,
        rollouts=scale.rollouts,
        tokens=scale.rollout_tokens,
    )
    chosen: list[list[int]] = []
    (expand,) = next(program)
    while len(chosen) < scale.expansions:
        text = expand.text
        chosen.append(text.tokens.tolist())
        run = forked.fork(text.capsule, [[]] * expand.width, expand.tokens)
        forked_s += run.total_s
        prefilled += run.prefill_tokens
        drawn += sum(map(len, run.tokens.values()))
        answers = [
            Text(
                np.concatenate([text.tokens, np.array(answer, np.uint32)]),
                capsule_id(RequestId(request), branch),
            )
            for (request, branch), answer in sorted(run.tokens.items())
        ]
        if len(chosen) < scale.expansions:
            (expand,) = program.send([answers])
    program.close()
    cached_s, _, cached_prefilled = _resent(cached, chosen, scale)
    measured = chosen[: scale.measured_expansions]
    resent_s, resent_drawn, resent_prefilled = _resent(plain, measured, scale)
    return Search(
        forked_s=forked_s,
        cached_s=cached_s,
        resent_s=resent_s * len(chosen) / len(measured),
        drawn=drawn,
        resent_drawn=resent_drawn,
        prefilled=prefilled,
        cached_prefilled=cached_prefilled,
        resent_prefilled=resent_prefilled,
    )


def _resent(ours: Ours, texts: Sequence[list[int]], scale: Scale) -> tuple[float, int, int]:
    """Seconds, tokens drawn and tokens computed of prompts, each text sent once for each rollout."""
    seconds, drawn, prefilled = 0.0, 0, 0
    for text in texts:
        run = ours.generate([text] * scale.rollouts, scale.rollout_tokens, SAMPLED)
        seconds += run.total_s
        prefilled += run.prefill_tokens
        drawn += sum(map(len, run.tokens.values()))
    return seconds, drawn, prefilled
