"""The three figures of routing: made by one call, under stated conditions.

ttft_by_policy      time to first token by policy, at equal load
hit_rate_by_cache   share of prompts found in caches, by their size
fanout_spill        end of the last child of a fan-out, by the number of children
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from mallee.figures.charts import Line, cdf_figure, curves_figure
from mallee.figures.files import made_folder
from mallee.figures.page import Facts, Page, write_page
from mallee.figures.replays.write import facts
from mallee.figures.style import BLUE, GREY, ORANGE, Look, require_matplotlib
from mallee.mocker.replay.config import ReplayConfig
from mallee.mocker.sweeps.pool import Done, Failed, Job, Run, run_jobs
from mallee.mocker.timing.profiles import DEFAULT_TIMING
from mallee.protocol.errors import ConfigError
from mallee.traces.made import fan_out_workload
from mallee.traces.workload import Workload

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FORKS: Final = "forks of a capsule, split where that is sooner"
_STAY: Final = "forks of a capsule, all on its worker"
_PLAIN: Final = "plain requests, round robin"
_FANS: Final[dict[str, tuple[str, bool, Look]]] = {
    _FORKS: ("cost", True, Look(BLUE, "-", "o")),
    _STAY: ("prefix_only", True, Look(ORANGE, (0, (5, 1.5)), "s")),
    _PLAIN: ("round_robin", False, Look(GREY, (0, (2, 1)), "D")),
}


@dataclass(frozen=True, slots=True)
class Conditions:
    """Fleet and traffic of the figures. KV memory of an engine is in tokens."""

    engines: int = 4
    kv_tokens: int = 1_048_576
    timing: str = DEFAULT_TIMING
    speedup: float = 1.0
    seed: int = 0
    policies: tuple[str, ...] = ("cost", "prefix_only", "least_loaded", "round_robin", "random")
    cache_policies: tuple[str, ...] = ("cost", "least_loaded", "round_robin")
    cache_tokens: tuple[int, ...] = tuple(131_072 << i for i in range(7))
    fan_engines: int = 8
    fan_children: tuple[int, ...] = (1, 4, 16, 64, 128, 256, 512, 1024)
    fan_rows: int = 256  # that an engine runs at once
    fan_tokens: int = 1_048_576
    prefix_tokens: int = 16_384
    suffix_tokens: int = 128
    output_tokens: int = 32


class Figures(NamedTuple):
    """Measurements as plain data, by figure, and the files that show them."""

    data: dict[str, Any]
    paths: list[Path]


def make_figures(
    make: Callable[[], Workload],
    out_dir: Path | str,
    conditions: Conditions,
    *,
    processes: int,
    on_done: Callable[[int, Done], None] = lambda index, done: None,
) -> Figures:
    """Replay what the figures need, draw them into `out_dir`: three PNGs, figures.html, figures.json.

    Raises ConfigError, also if any of the replays failed.
    """
    require_matplotlib()
    made_folder(out_dir)
    jobs = all_jobs(make, conditions)
    outcomes = run_jobs(list(jobs.values()), processes=processes, on_done=on_done)
    runs: dict[Any, Run] = {}
    for key, done in zip(jobs, outcomes, strict=True):
        if isinstance(done, Failed):
            raise ConfigError(f"{key}: {done.error}")
        runs[key] = done
    workload = make()
    return _draw(out_dir, conditions, runs, workload.name, ideal_hit_rate(workload))


def all_jobs(make: Callable[[], Workload], conditions: Conditions) -> dict[Any, Job]:
    """Every replay that some figure needs, once."""
    base = ReplayConfig(
        engines=conditions.engines,
        timing=conditions.timing,
        speedup=conditions.speedup,
        seed=conditions.seed,
    ).validate()
    base.load_timing()
    pairs = [(policy, conditions.kv_tokens) for policy in conditions.policies]
    pairs += [(p, tokens) for p in conditions.cache_policies for tokens in conditions.cache_tokens]
    jobs: dict[Any, Job] = {
        (policy, tokens): Job(make, replace(base, policy=policy, kv_tokens=tokens))
        for policy, tokens in dict.fromkeys(pairs)
    }
    for name, (policy, as_forks, _) in _FANS.items():
        config = replace(
            base,
            engines=conditions.fan_engines,
            kv_tokens=conditions.fan_tokens,
            policy=policy,
            speedup=1.0,
            max_rows=conditions.fan_rows,
            shared_reads=True,  # as our engine reads blocks that rows share
        )
        for children in conditions.fan_children:
            fan = partial(
                fan_out_workload,
                children,
                prefix_tokens=conditions.prefix_tokens,
                suffix_tokens=conditions.suffix_tokens,
                output_tokens=conditions.output_tokens,
                as_forks=as_forks,
            )
            jobs[name, children] = Job(fan, config)
    return jobs


def ideal_hit_rate(workload: Workload) -> float:
    """The share of prompt tokens that one endless cache would hold when each prompt arrives."""
    seen: set[int] = set()
    size = workload.id_tokens
    prompt = found = 0
    for request in workload:
        ids = list(request.ids)
        known = next((i for i, each in enumerate(ids) if each not in seen), len(ids))
        seen.update(ids[known:])
        prompt += request.input_tokens
        found += min(known, max(0, request.input_tokens - 1) // size) * size
    return found / prompt if prompt else 0.0


def _draw(
    out_dir: Path | str, conditions: Conditions, runs: dict[Any, Run], trace: str, ideal: float
) -> Figures:
    by_policy = {policy: runs[policy, conditions.kv_tokens] for policy in conditions.policies}
    by_cache = {
        policy: [runs[policy, tokens].summary["hit_rate"] for tokens in conditions.cache_tokens]
        for policy in conditions.cache_policies
    }
    by_children = {
        name: [runs[name, n].slowest_ms["child"] for n in conditions.fan_children] for name in _FANS
    }
    scenes = {
        "ttft_by_policy": _policies(conditions, by_policy, trace),
        "hit_rate_by_cache": _caches(conditions, by_cache, trace, ideal),
        "fanout_spill": _fans(conditions, by_children),
    }
    data = {
        "trace": trace,
        "conditions": asdict(conditions),
        "ttft_ms": {policy: run.summary["ttft_ms"] for policy, run in by_policy.items()},
        "hit_rate": {"kv_tokens": list(conditions.cache_tokens), "ideal": ideal, **by_cache},
        "slowest_child_ms": {"children": list(conditions.fan_children), **by_children},
        "digests": {"/".join(map(str, key)): run.summary["digest"] for key, run in runs.items()},
    }
    sections = [Facts("Conditions", facts({"trace": trace, **asdict(conditions)}))]
    page = Page("What routing does", f"{trace}, in virtual time", [], scenes, sections)
    return Figures(data, write_page(out_dir, "figures", data, page))


def _policies(conditions: Conditions, runs: dict[str, Run], trace: str) -> "tuple[Figure, str]":
    figure = cdf_figure(
        [Line(policy, run.ttft_ms) for policy, run in runs.items()],
        title="Time to first token, by policy",
        xlabel=f"time to first token (ms), {conditions.engines} engines with"
        f" KV for {conditions.kv_tokens:,} tokens each",
    )
    return figure, f"{trace}, all policies at the same arrivals. Further left is sooner."


def _caches(
    conditions: Conditions, hit_rates: dict[str, list[float]], trace: str, ideal: float
) -> "tuple[Figure, str]":
    figure = curves_figure(
        _lines(conditions.cache_tokens, hit_rates, 100.0),
        title="Prompt tokens found in caches",
        xlabel=f"KV memory of each of {conditions.engines} engines, in tokens",
        ylabel="hit rate (%)",
        ceiling=(100 * ideal, "one endless cache"),
    )
    return figure, f"{trace}. Blind policies hold the same text several times, and less of it."


def _fans(conditions: Conditions, slowest_ms: dict[str, list[float]]) -> "tuple[Figure, str]":
    figure = curves_figure(
        _lines(conditions.fan_children, slowest_ms, 1.0),
        title="The last child of a fan-out is done",
        xlabel=f"children of one prompt of {conditions.prefix_tokens:,} tokens,"
        f" {conditions.fan_engines} engines",
        ylabel="after (ms)",
        log_y=True,
    )
    return figure, (
        f"{conditions.suffix_tokens} tokens of their own and {conditions.output_tokens} of answer each."
        " A fan-out stays with its parent's state while that engine runs it at once; a larger one is"
        " split where copying the prefix is clearly sooner than queueing. Plain requests pay for a copy"
        " on each engine, however few they are."
    )


def _lines(x: Sequence[int], values: dict[str, list[float]], times: float) -> list[Line]:
    return [
        Line(
            name,
            np.array(x, dtype=float),
            times * np.array(y),
            _FANS[name][2] if name in _FANS else None,
        )
        for name, y in values.items()
    ]
