"""Agreement of generated traces with their sources: every gate, on real traces, for both models.

    python -m bench.synth.gates [--traces mooncake,fleet,..] [--models tree,session] [--seeds 8]
                                [--no-replay] [--processes 2] [--out FILE]

A model is fitted once to each trace and makes as many requests as the trace has, with each seed. Values
are medians over the seeds; `mallee.synth.compare.gates` says how each is computed. Beside them is noise:
"starts" is the source against itself with recorded sessions begun at other times (Mooncake: at other places
inside the 3 s ticks), "halves" half of its sessions against the other half. Where noise alone is above a bar,
a miss says little. Columns "of half" are models that learned half of the sessions, against the other half: to
be read beside the noise of halves. The last line is one JSON object.
"""

import argparse
import itertools
import json
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final, NamedTuple

from bench import TRACES as RECORDED
from mallee.cli.synth.replays import replay
from mallee.synth.compare.fits import (
    DEALS,
    Reading,
    compare_model,
    conditions,
    held_out,
    noises,
    source_of,
)
from mallee.synth.compare.gates import Outcome, Value, outcomes
from mallee.synth.compare.replays import Stage
from mallee.synth.compare.report import ALL_GATES, GateTable, as_data, counts, shown
from mallee.synth.fit import fit
from mallee.traces.read import read_workload
from mallee.traces.workload import Workload

MODELS: Final = ("tree", "session")
HELD: Final = " of half"  # of columns: learned from half of the sessions, compared with the others
TRACES: Final[dict[str, tuple[str, int | None]]] = {
    "fleet": ("claude_code_sessions.jsonl.gz", 512),
    "mooncake": ("mooncake_conversation.jsonl.gz", 512),
    "mini_swe": ("miniswe_swebench_blk64.jsonl.gz", 64),
    "game24": ("tot_game24_trees.jsonl.gz", 16),
    "crosswords": ("tot_crosswords_dfs.jsonl.gz", 16),
    "azure_code": ("azure2023_code.csv.gz", None),
    "azure_conv": ("azure2023_conv.csv.gz", None),
}
"""File and tokens of a block, the longest runs first."""


class Task(NamedTuple):
    """A part of the work on one trace, done in a process of its own.

    Without a model: the trace's noise, and the stage for replays. With one: it is fitted and compared over
    all seeds; or, with a stage, replayed with one of them; or, with deals, fitted to halves alone.
    """

    trace: str
    model: str
    seeds: tuple[int, ...]
    length_seeds: int
    replay_requests: int  # 0: none
    limit: int | None
    stage: Stage | None = None
    deals: tuple[int, ...] = ()


class Part(NamedTuple):
    """`values` by column: the model's name (one for each seed), or the kinds of noise (one each)."""

    conditions: dict[str, Any]
    values: dict[str, list[dict[str, Value]]]
    details: dict[str, Any]
    stage: Stage | None = None


def reading_of(name: str, limit: int | None) -> Reading:
    file, block_size = TRACES[name]
    return Reading(partial(_read, RECORDED / file, limit), block_size)


def _read(path: Path, limit: int | None, seed: int) -> Workload:
    return read_workload(path, seed=seed, limit=limit)


def do(task: Task) -> Part:
    reading = reading_of(task.trace, task.limit)
    if not task.model:
        replayer = replay if task.replay_requests else None
        source = source_of(reading, replayer, requests=task.replay_requests)
        values = noises(source)
        details: dict[str, Any] = (
            {} if source.stage is None else {"source": source.stage.source.as_data()}
        )
        return Part(conditions(source), values, details, source.stage)
    source = source_of(reading)
    if task.deals:
        learn = partial(fit, kind=task.model)
        held = [held_out(source, learn, deal) for deal in task.deals]
        column = {task.model + HELD: [each for each in held if each is not None]}
        return Part(conditions(source), column if any(held) else {}, {})
    begun = time.process_time()
    model = fit(source.trace, task.model)
    fit_s = round(time.process_time() - begun, 3)
    if task.stage is not None:
        made = model.generate(requests=len(source.trace), seed=task.seeds[0])
        found, replays = task.stage.against(made)
        return Part(conditions(source), {task.model: [found]}, {"replays": [replays.as_data()]})
    begun = time.process_time()
    samples = [
        compare_model(source, model, seed, with_lengths=seed <= task.length_seeds)
        for seed in task.seeds
    ]
    details = {
        "fit_cpu_s": fit_s,
        "compare_cpu_s": round(time.process_time() - begun, 3),
        "hit_rates_at_1x_4x_16x": [each.hit_rates for each in samples if each.hit_rates],
    }
    return Part(conditions(source), {task.model: [each.values for each in samples]}, details)


class Found(NamedTuple):
    """All that came of a trace. `values` and `details` by column, as in `Part`."""

    conditions: dict[str, Any]
    values: dict[str, list[dict[str, Value]]]
    details: dict[str, dict[str, Any]]

    def add(self, task: Task, part: Part) -> None:
        self.conditions.update({k: v for k, v in part.conditions.items() if v is not None})
        for column, values in part.values.items():
            self.values.setdefault(column, []).extend(values)
        details = self.details.setdefault(task.model, {})
        for name, each in part.details.items():
            details[name] = details[name] + each if name == "replays" and name in details else each

    def outcomes(self, *, noise: bool) -> dict[str, list[Outcome]]:
        """Of the models, in their order, or of the kinds of noise."""
        models = [*MODELS, *(name + HELD for name in MODELS)]
        columns = [c for c in self.values if c not in models] if noise else models
        return {c: outcomes(self.values[c], ALL_GATES) for c in columns if c in self.values}


def run(tasks: Sequence[Task], processes: int, replay_seeds: int) -> Iterator[tuple[Task, Part]]:
    """In the order in which they end. Replays of a trace begin when there is a stage for it."""
    models = list(dict.fromkeys(task.model for task in tasks if task.model))
    with ProcessPoolExecutor(processes, get_context("spawn"), max_tasks_per_child=1) as pool:
        waiting = {pool.submit(do, task): task for task in tasks}
        while waiting:
            done, _ = wait(waiting, return_when=FIRST_COMPLETED)
            for future in done:
                task, part = waiting.pop(future), future.result()
                yield task, part
                if part.stage is not None:
                    for seed, model in itertools.product(range(1, replay_seeds + 1), models):
                        later = task._replace(model=model, seeds=(seed,), stage=part.stage)
                        waiting[pool.submit(do, later)] = later


def tables(found: dict[str, Found]) -> Iterator[str]:
    """Markdown, trace by trace."""
    for trace, each in found.items():
        about = each.conditions
        yield f"### {trace}: {about['requests']:,} requests, {about['block_size']}-token blocks"
        yield ""
        yield from GateTable(each.outcomes(noise=False), each.outcomes(noise=True)).markdown()
        yield ""


def summary(found: dict[str, Found]) -> Iterator[str]:
    """Markdown: how many gates each model passes on each trace, and which it fails."""
    yield "| trace | model | passes | fails |"
    yield "|---|---|---|---|"
    for trace, each in found.items():
        for model, gates in each.outcomes(noise=False).items():
            count = counts(gates)
            fails = [f"{g.gate.name} {shown(g.value)}" for g in gates if g.verdict == "FAIL"]
            of = count["pass"] + count["fail"]
            yield f"| {trace} | {model} | {count['pass']} of {of} | {', '.join(fails)} |"
    yield ""


def as_json(found: dict[str, Found]) -> dict[str, Any]:
    return {
        trace: {
            "conditions": each.conditions,
            "noise": {k: as_data(v) for k, v in each.outcomes(noise=True).items()},
            "source_replays": each.details.get("", {}).get("source"),
            "models": {
                name: {
                    "counts": counts(gates),
                    **each.details.get(name, {}),
                    "gates": as_data(gates),
                }
                for name, gates in each.outcomes(noise=False).items()
            },
        }
        for trace, each in found.items()
    }


def main(args: list[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--traces", type=_names, default=list(TRACES))
    parser.add_argument("--models", type=_names, default=list(MODELS))
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--length-seeds", type=int, default=8, help="tried at 4x and 16x length")
    parser.add_argument("--replay-seeds", type=int, default=3, help="replayed")
    parser.add_argument("--replay-requests", type=int, default=6000, help="the first of each trace")
    parser.add_argument("--no-replay", action="store_true")
    parser.add_argument("--no-held-out", action="store_true")
    parser.add_argument("--limit", type=int, help="only so many requests of each trace")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path, help="write the JSON here; what it has stays")
    given = parser.parse_args(args)
    seeds = tuple(range(1, given.seeds + 1))
    requests = 0 if given.no_replay else given.replay_requests
    tasks = [
        Task(trace, model, seeds, given.length_seeds, requests, given.limit)
        for trace in TRACES
        if trace in given.traces
        for model in ["", *given.models]
    ]
    if not given.no_held_out:
        tasks += [task._replace(deals=DEALS) for task in tasks if task.model]
    found = {task.trace: Found({}, {}, {}) for task in tasks}
    begun = time.perf_counter()
    for task, part in run(tasks, given.processes, given.replay_seeds):
        found[task.trace].add(task, part)
        what = f"{task.model} replay {task.seeds[0]}" if task.stage else task.model or "noise"
        what += HELD if task.deals else ""
        sys.stderr.write(f"{time.perf_counter() - begun:6.0f} s  {task.trace} {what}\n")
    print("\n".join([*summary(found), *tables(found)]))
    data = as_json(found)
    if given.out is not None:
        _merge(given.out, data)
    print(json.dumps(data, allow_nan=False))


def _merge(path: Path, data: dict[str, Any]) -> None:
    """Traces and models that were not run keep what the file has of them."""
    whole = json.loads(path.read_text()) if path.exists() else {}
    for trace, parts in data.items():
        before = whole.get(trace, {"noise": {}, "models": {}})
        whole[trace] = {
            "conditions": parts["conditions"],
            "noise": before["noise"] | parts["noise"],
            "source_replays": parts["source_replays"],
            "models": before["models"] | parts["models"],
        }
    path.write_text(json.dumps(whole, indent=1, allow_nan=False) + "\n")


def _names(text: str) -> list[str]:
    return text.split(",")


if __name__ == "__main__":
    main(sys.argv[1:])
