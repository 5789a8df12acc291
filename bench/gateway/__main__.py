"""Our gateway beside smg, in front of the same kind of stub: added latency, throughput, fork affinity.

    python -m bench.gateway [--quick] [--smg PATH] [--tokenizer FOLDER] [--rounds 3]

Three processes each: load generator (`load.py`), gateway, stub backends (`backends.py`, four of them
in one process). The two gateways take turns, never at the same time; medians of the rounds. Added
latency (one client) is the median through the gateway minus the median straight to a stub. smg runs its
`cache_aware` policy with its defaults over HTTP, on as many cores as there are. Ours is one replica: the
real API, service, router and links, without Ray and NATS (`process.py`), and a
tokenizer that costs nothing, since smg's HTTP mode has none; with `--tokenizer` a checkpoint's own.
`tokens`: prompts as token ids, which smg refuses over HTTP.

Fork: a parent, then B children at once that extend its prompt exactly, two trees at a time, 4 backends
that take 20 ms. The table goes to stderr, the last line of stdout is one JSON object.
"""

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from bench import measure
from bench.doubles.ports import free_ports
from bench.processes import running, wait_for

NUM_BACKENDS = 4
FORK_DELAY_MS = 20.0
PROMPT_CHARS = 4096


class Scale(NamedTuple):
    seconds: float = 2.0
    rounds: int = 3
    concurrency: tuple[int, ...] = (1, 16, 64)
    branches: tuple[int, ...] = (2, 4, 8, 16, 32)
    trees: int = 2
    fork_rounds: int = 20


QUICK = Scale(0.2, 1, (1, 4), (2, 4), 1, 2)


@contextmanager
def targets(args: argparse.Namespace, delay_ms: float) -> Iterator[dict[str, str]]:
    """Urls by side: direct (a stub), ours, and peer if smg was found; all in front of the same stubs."""
    *http, ours, peer, metrics = free_ports(NUM_BACKENDS + 3)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))

        def start(name: str, port: int, command: list[str]) -> str:
            url, log = f"http://127.0.0.1:{port}", folder / f"{name}.log"
            wait_for(url, stack.enter_context(running(command, log)), log)
            return url

        workers = [str(folder / f"w{i}.sock") for i in range(NUM_BACKENDS)]
        sockets = ["--workers", *workers, "--events", str(folder / "events.sock")]
        stub = [sys.executable, "-m", "bench.gateway.backends", "--delay-ms", str(delay_ms)]
        stub += ["--http", *map(str, http), *sockets]
        urls = {"direct": start("stub", http[0], stub)}
        gateway = [sys.executable, "-m", "bench.gateway.process", "--port", str(ours)]
        gateway += sockets
        gateway += ["--tokenizer", args.tokenizer] if args.tokenizer else []
        urls["ours"] = start("ours", ours, gateway)
        if args.smg:
            backends = [f"http://127.0.0.1:{port}" for port in http]
            command = [args.smg, "launch", "--host", "127.0.0.1", "--port", str(peer)]
            command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics)]
            command += ["--policy", "cache_aware", "--log-level", "error"]
            urls["peer"] = start("smg", peer, [*command, "--worker-urls", *backends])
        yield urls


def load(url: str, **options: Any) -> dict[str, Any]:
    """Figures of the load generator. Raises RuntimeError if a request failed."""
    command = [sys.executable, "-m", "bench.gateway.load", "--url", url]
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        command += [flag] if value is True else [flag, str(value)]
    result = measure.last_line(command)
    first_error = result.pop("first_error")
    if result["errors"]:
        raise RuntimeError(
            f"{url}: {result['errors']} of {result['requests']} requests failed: {first_error}"
        )
    return result


def latency(urls: dict[str, str], scale: Scale) -> dict[str, dict[str, dict[str, float]]]:
    """side -> case -> figures; in every round each side has its turn at each case."""
    cases: dict[str, dict[str, Any]] = {
        f"c{n}": {"concurrency": n, "workload": "prefix"} for n in scale.concurrency
    }
    cases["tokens_c1"] = {"concurrency": 1, "workload": "prefix", "tokens": True}
    found: dict[str, dict[str, list[dict[str, float]]]] = {side: {} for side in urls}
    for _ in range(scale.rounds):
        for case, options in cases.items():
            for side, url in urls.items():
                if side == "peer" and case == "tokens_c1":
                    continue
                run = load(url, seconds=scale.seconds, prompt_chars=PROMPT_CHARS, **options)
                found[side].setdefault(case, []).append(run)
    return {
        side: {case: measure.medians(runs) for case, runs in by_case.items()}
        for side, by_case in found.items()
    }


def forks(urls: dict[str, str], scale: Scale) -> dict[str, dict[str, float]]:
    """side -> branches -> share of children that the parent's worker answered."""
    found: dict[str, dict[str, float]] = {side: {} for side in urls if side != "direct"}
    for branches in scale.branches:
        for side, by_branches in found.items():
            run = load(
                urls[side],
                workload="fork",
                branches=branches,
                trees=scale.trees,
                rounds=scale.fork_rounds,
                prompt_chars=PROMPT_CHARS,
                seed=branches,
            )
            by_branches[str(branches)] = run["affinity"]
    return found


def _side(
    side: dict[str, dict[str, float]], direct: dict[str, dict[str, float]]
) -> dict[str, dict[str, float]]:
    """Figure -> case, from case -> figure."""
    result = {
        figure: {case: run[figure] for case, run in side.items()}
        for figure in ("p50_ms", "p99_ms", "rps")
    }
    result["added_ms"] = {
        case: run["p50_ms"] - direct[case]["p50_ms"] for case, run in side.items()
    }
    return result


def summary(
    times: dict[str, dict[str, dict[str, float]]], affinity: dict[str, dict[str, float]]
) -> dict[str, Any]:
    """direct, ours, peer and ratio (above 1: ours is better)."""
    direct = times["direct"]
    result: dict[str, Any] = {"direct": _side(direct, direct)}
    for side in affinity:
        result[side] = _side(times[side], direct) | {"fork_affinity": affinity[side]}
    result.setdefault("peer", {})
    result["ratio"] = {
        figure: measure.ratios(
            values, result["peer"].get(figure, {}), lower_is_better=figure.endswith("_ms")
        )
        for figure, values in result["ours"].items()
    }
    return result


def _print_table(result: dict[str, Any]) -> None:
    sides = ("direct", "ours", "peer", "ratio")
    print(f"{'':>24}" + "".join(f"{side:>12}" for side in sides), file=sys.stderr)
    for figure, cases in result["ours"].items():
        for case in cases:
            cells = [result[side].get(figure, {}).get(case) for side in sides]
            texts = ["" if cell is None else f"{measure.rounded(cell):,}" for cell in cells]
            print(
                f"{f'{figure}.{case}':>24}" + "".join(f"{text:>12}" for text in texts),
                file=sys.stderr,
            )


def _arguments() -> argparse.Namespace:
    beside = Path(sys.executable).with_name("smg")
    found = str(beside) if beside.exists() else shutil.which("smg")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a moment each: does it run at all")
    parser.add_argument("--smg", default=found, help="its program; '' to leave it out")
    parser.add_argument("--tokenizer", help="a checkpoint's folder; else a free stand-in")
    parser.add_argument("--rounds", type=int)
    return parser.parse_args()


def main() -> int:
    args = _arguments()
    scale = QUICK if args.quick else Scale()
    if args.rounds is not None:
        scale = scale._replace(rounds=args.rounds)
    with targets(args, 0.0) as urls:
        times = latency(urls, scale)
    with targets(args, FORK_DELAY_MS) as urls:
        affinity = forks(urls, scale)
    result = summary(times, affinity)
    _print_table(result)
    result |= {
        "tokenizer": args.tokenizer or "free",
        "prompt_chars": PROMPT_CHARS,
        **measure.machine(),
    }
    print(json.dumps(measure.rounded(result)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
