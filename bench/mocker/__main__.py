"""Speed of replays and their scenes of forks: `mallee.mocker.replay` in virtual time.

    python -m bench.mocker [--trace FILE.jsonl[.gz]] [--dynamo PYTHON] [--only NAME ...] [--requests N]

Each case has a process of its own, one at a time, on one core. Names: `mooncake` (4 to 1000 engines,
round robin and KV-routed, 16,384 blocks of 512 tokens), `blocks16` (blocks of 16 tokens, as many tokens
a worker, first 2000 requests), `forks` (1000 engines, 200,000 branches), `document` (50 readers of one
50,000-token document), `two_agents` (on one document, calibrated with two measured constants) and
`agents` (1 to 64 of them on one engine). `--dynamo`: an interpreter that has ai-dynamo-runtime; its own
replay of the trace then runs right after each of ours, with its default timing as ours has.

The last line is one JSON object. `requests_per_s` counts the run alone, `whole_requests_per_s` also the
reading of the trace and the making of the fleet, `requests_per_cpu_s` the CPU's seconds for all that.
"""

import argparse
import gzip
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from time import process_time
from typing import Any, Final

from bench import ROOT, TRACES
from bench.doubles.workloads import forks
from bench.measure import last_line, machine, rounded
from bench.mocker import scenes
from mallee.mocker.replay.config import ReplayConfig
from mallee.mocker.replay.result import Result
from mallee.mocker.replay.run import replay
from mallee.traces.read import read_workload

TRACE = TRACES / "mooncake_conversation.jsonl.gz"
DYNAMO_REPLAY = ROOT / "bench" / "peers" / "dynamo_replay.py"
NAMES: Final = ("mooncake", "blocks16", "forks", "document", "two_agents", "agents")
ENGINES: Final = (4, 16, 64, 1000)
POLICIES: Final = {"round_robin": "round_robin", "cost": "kv_router"}  # by Dynamo's name
KV_TOKENS, BLOCK_TOKENS = 8_388_608, 512
KEPT: Final = (
    *("requests", "requests_per_s", "wall_s", "open_s", "read_s", "hit_rate", "prefix_copies"),
    *("ttft_ms", "itl_ms", "evictions", "num_events", "num_steps", "digest", "peak_mb"),
)


def mooncake(trace: str, requests: int, **config: Any) -> dict[str, Any]:
    """The trace at its own pace, ticks as they are; a short run before, so that kernels are loaded."""
    wanted = ReplayConfig(timing="dynamo", shared_reads=False, max_requests=requests, **config)
    path = Path(trace)
    replay(read_workload(path, limit=50), ReplayConfig(block_size=wanted.block_size))
    return _timed(lambda: replay(read_workload(path, spread_ticks=False), wanted))


def fork_fleet(engines: int, trees: int, width: int) -> dict[str, Any]:
    """`trees` prompts of 2048 tokens, each forked into `width` branches of 16 + 32 tokens."""
    scene = forks(trees, width, prefix_tokens=2048, gap_s=0.01)
    figures = _timed(lambda: replay(scene, ReplayConfig(engines=engines, kv_tokens=65_536)))
    branches = trees * width
    return figures | {"branches": branches, "branches_per_s": branches / figures["wall_s"]}


def _timed(run: Callable[[], Result]) -> dict[str, Any]:
    begin = process_time()
    summary = run().summary
    cpu_s = process_time() - begin
    whole_s = sum(summary[name] for name in ("wall_s", "open_s", "read_s"))
    return {name: summary[name] for name in KEPT} | {
        "whole_requests_per_s": summary["requests"] / whole_s,
        "requests_per_cpu_s": summary["requests"] / cpu_s,
    }


CASES: Final[dict[str, Callable[..., dict[str, Any]]]] = {
    "mooncake": mooncake,
    "forks": fork_fleet,
    "document": scenes.document,
    "two_agents": scenes.two_agents,
    "agents": scenes.agents_sweep,
}


def apart(case: str, **arguments: Any) -> dict[str, Any]:
    """The case's figures, from a process of its own."""
    told = json.dumps([case, arguments])
    return last_line([sys.executable, "-m", "bench.mocker", "--case", told])


def both(
    trace: Path, plain: Path | None, dynamo: str | None, requests: int, **config: Any
) -> dict[str, Any]:
    """Ours, and right after it Dynamo's if it is there."""
    ours = apart("mooncake", trace=str(trace), requests=requests, **config)
    if dynamo is None or plain is None:
        return {"mallee": ours}
    size, blocks = config["block_size"], config["kv_tokens"] // config["block_size"]
    mode, engines = POLICIES[config["policy"]], str(config["engines"])
    # -P: the script's folder has a module of the peer's name.
    command = [dynamo, "-P", str(DYNAMO_REPLAY), str(plain), engines, mode]
    peer = last_line([*command, str(blocks), str(size)])
    names = ("requests_per_s", "whole_requests_per_s", "requests_per_cpu_s")
    return {
        "mallee": ours,
        "dynamo": peer,
        "ratio": {name: ours[name] / peer[name] for name in names},
    }


def _plain(trace: Path, requests: int, folder: str) -> Path:
    """The trace's first rows as plain text, which is what Dynamo reads."""
    out = Path(folder) / f"first-{requests}.jsonl"
    with (
        gzip.open(trace, "rt") if trace.suffix == ".gz" else trace.open() as lines,
        out.open("w") as plain,
    ):
        for number, line in enumerate(lines):
            if requests and number >= requests:
                break
            plain.write(line)
    return out


def table(report: dict[str, Any]) -> Iterator[str]:
    """The speed of each replay, beside Dynamo's."""
    yield "| case | requests/s | Dynamo | ratio | hit rate | peak MB |"
    yield "|---|---|---|---|---|---|"
    for name, each in report.items():
        if "mallee" not in each:
            continue
        ours, peer = each["mallee"], each.get("dynamo")
        theirs = (
            f"{peer['requests_per_s']:,.0f} | {each['ratio']['requests_per_s']:.2f}"
            if peer
            else "- | -"
        )
        yield (
            f"| {name} | {ours['requests_per_s']:,.0f} | {theirs} | {ours['hit_rate']:.3f}"
            f" | {ours['peak_mb']:.0f} |"
        )


def measure(given: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Every case that was asked for; `folder` is for files on the way."""
    report: dict[str, Any] = {}
    for size in (BLOCK_TOKENS, 16):
        name = "mooncake" if size == BLOCK_TOKENS else "blocks16"
        if name not in given.only:
            continue
        requests = given.requests if name == "mooncake" else min(given.requests or 2000, 2000)
        plain = _plain(given.trace, requests, folder) if given.dynamo else None
        for engines in ENGINES if name == "mooncake" else ENGINES[:1]:
            for policy in POLICIES:
                config: dict[str, Any] = {
                    "engines": engines,
                    "policy": policy,
                    "block_size": size,
                    "kv_tokens": KV_TOKENS,
                }
                found = both(given.trace, plain, given.dynamo, requests, **config)
                report[f"{name} {engines} {policy}"] = found
                print(f"{name} {engines} {policy}: {json.dumps(rounded(found))}", file=sys.stderr)
    if "forks" in given.only:
        few = bool(given.requests)
        sizes = {"engines": 100, "trees": 20, "width": 100} if few else _FORKS
        report["forks"] = {"mallee": apart("forks", **sizes)}
    for name in ("document", "two_agents", "agents"):
        if name in given.only:
            report[name] = apart(name)
    return report


_FORKS: Final = {"engines": 1000, "trees": 1000, "width": 200}


def main(args: list[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trace", type=Path, default=TRACE)
    parser.add_argument("--dynamo", help="an interpreter that has ai-dynamo-runtime")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--requests", type=int, default=0, help="of the trace; 0: all")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    given = parser.parse_args(args)
    if given.case:
        case, arguments = json.loads(given.case)
        print(json.dumps(CASES[case](**arguments)))
        return
    if not given.trace.is_file() and {"mooncake", "blocks16"} & set(given.only):
        parser.error(f"no trace at {given.trace}: give --trace, or --only what needs none")
    with tempfile.TemporaryDirectory() as folder:
        report = measure(given, folder)
    print("\n".join(table(report)))
    print(json.dumps(rounded(report) | machine()))


if __name__ == "__main__":
    main(sys.argv[1:])
