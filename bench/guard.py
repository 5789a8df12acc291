"""Benches of this tree beside those of an earlier commit, by turns: is anything slower?

    python -m bench.guard [--base COMMIT] [--only serve router ...] [--turns 3]

Each side runs its own files, in the environment of this one. A figure is the best of its turns: what else the
machine does makes a turn slower, never faster. Where a ratio is below the bar, both sides take as many turns
again, once. The last line is one JSON object; the exit status is 1 where a figure stays below the bar.
`--base` is the commit of README's figures of serving unless given.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

from bench import ROOT
from bench.report.tables import at, load

BAR: Final = 0.95
LIMIT_S: Final = 900.0  # for one turn of one bench


class Bench(NamedTuple):
    """Arguments of a bench, and paths into its result: first where more is better, then where less is."""

    words: tuple[str, ...]
    more: tuple[str, ...] = ()
    less: tuple[str, ...] = ()


LOADS: Final = ("c1/rps", "c16/rps", "c64/rps", "streams128/tokens_per_s")
MATCHES: Final = tuple(
    f"match_us/{kind}_{depth}" for kind in ("shared", "part") for depth in (64, 4096)
)
REPLAYS: Final = tuple(
    f"mooncake {kind}/mallee/requests_per_cpu_s" for kind in ("4 cost", "1000 cost")
)
BENCHES: Final = {
    "router": Bench(
        ("router", "--no-peer", "--only", "match", "store", "route"),
        more=("store_mblocks_s", "remove_mblocks_s", "routes_s"),
        less=(*MATCHES, "route_us/p50"),
    ),
    "mocker": Bench(("mocker", "--only", "mooncake", "--requests", "2000"), more=REPLAYS),
    "engine": Bench(
        ("engine", "--rounds", "1"),
        more=(
            *(f"prefill_tok_s/{n}" for n in (256, 1024)),
            *(f"decode_tok_s/b{n}" for n in (1, 8, 32)),
        ),
        less=("fork32/total_s", "fork32/ttft_ms"),
    ),
    "serve": Bench(
        ("serve", "--sides", "serve,one_process", "--rounds", "1", "--smg", "", "--dynamo", ""),
        more=tuple(f"{side}/{load}" for side in ("serve", "one_process") for load in LOADS),
    ),
}


class Figure(NamedTuple):
    """One path of a bench's result: the turns of both sides, and how many times better the best is now."""

    path: str
    now: list[float]
    base: list[float]
    ratio: float


@contextmanager
def checkout(commit: str) -> Iterator[Path]:
    """A work tree of the commit, until the end of the block."""
    git = ["git", "-C", str(ROOT), "worktree"]
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "base"
        subprocess.run(
            [*git, "add", "--detach", str(tree), commit], check=True, capture_output=True
        )
        try:
            yield tree
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)


def turn(tree: Path, bench: Bench) -> Any:
    """The object that the bench prints last, run in the tree. Raises RuntimeError with its last words."""
    env = {**os.environ, "PYTHONPATH": f"{tree / 'src'}{os.pathsep}{tree}"}
    command = [sys.executable, "-m", f"bench.{bench.words[0]}", *bench.words[1:]]
    done = subprocess.run(
        command, cwd=tree, env=env, capture_output=True, text=True, timeout=LIMIT_S
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} in {tree}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def compare(bench: Bench, now: Sequence[Any], base: Sequence[Any]) -> list[Figure]:
    """Figures that both sides have."""
    found = []
    for path in (*bench.more, *bench.less):
        ours, theirs = ([v for run in runs if (v := at(run, path))] for runs in (now, base))
        if ours and theirs:
            is_less = path in bench.less
            ratio = min(theirs) / min(ours) if is_less else max(ours) / max(theirs)
            found.append(Figure(path=path, now=ours, base=theirs, ratio=ratio))
    return found


def judge(bench: Bench, base: Path, turns: int) -> list[Figure]:
    """The bench's figures, the sides by turns; twice as many turns where a figure is below the bar."""
    now_runs, base_runs = [], []
    figures: list[Figure] = []
    for _ in range(2):
        for _ in range(turns):
            base_runs.append(turn(base, bench))
            now_runs.append(turn(ROOT, bench))
        figures = compare(bench, now_runs, base_runs)
        if all(figure.ratio >= BAR for figure in figures):
            break
    return figures


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="bench.guard", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--base", default=load("serve")["commit"])
    parser.add_argument("--only", nargs="+", choices=BENCHES, default=list(BENCHES))
    parser.add_argument("--turns", type=int, default=3)
    asked = parser.parse_args(words)
    found: dict[str, Any] = {}
    with checkout(asked.base) as tree:
        for name in asked.only:
            figures = judge(BENCHES[name], tree, asked.turns)
            if not figures:
                raise SystemExit(f"bench.{name}: {asked.base} has none of its figures")
            found[name] = {figure.path: figure._asdict() for figure in figures}
            for figure in figures:
                mark = "" if figure.ratio >= BAR else "  slower"
                print(f"{name} {figure.path}: {figure.ratio:.2f}{mark}", flush=True)
    slower = [
        f"{name} {path}"
        for name, figures in found.items()
        for path, each in figures.items()
        if each["ratio"] < BAR
    ]
    print(json.dumps({"base": asked.base, "bar": BAR, "slower": slower, "figures": found}))
    return 1 if slower else 0


if __name__ == "__main__":
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM)
    )  # so that the work tree goes
    sys.exit(main(sys.argv[1:]))
