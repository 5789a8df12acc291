"""The router's speed and memory, beside NVIDIA Dynamo's where that is installed.

    python -m bench.router [--quick] [--no-peer] [--unpinned] [--only match store ...]

Each part runs in a process of its own, both sides in the same one and by turns; what exactly is timed
stands in `index.py`, `memory.py` and `route.py`. The process is kept on one core:
Dynamo's binding hands every call to a thread of its own, and when that has to be woken on another core a
call takes ten times as long. So it is at its best here (`--unpinned` shows the other mode). Medians; a
ratio above 1 means ours is better. The table goes to stderr, the last line of stdout is one JSON object.

To run both: `pip install --no-deps ai-dynamo-runtime` and `pip install pydantic` beside mallee.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from bench import measure
from bench.peers import dynamo
from bench.router import index, memory, route
from bench.router.scale import QUICK, Scale

PARTS: dict[str, Callable[[Scale, bool], dict[str, Any]]] = {
    "match": index.match,
    "store": index.store,
    "memory": lambda scale, _: memory.memory(scale, "ours"),
    "memory_peer": lambda scale, has: memory.memory(scale, "peer") if has else {},
    "fleet": lambda scale, _: memory.fleet_memory(scale, "ours"),
    "fleet_peer": lambda scale, has: memory.fleet_memory(scale, "peer") if has else {},
    "route": route.route,
    "hash": route.hashing,
    "mixed": lambda scale, _: route.mixed(scale),
    "join": lambda scale, _: memory.join(scale),
}


def _ratios(ours: dict[str, Any], peer: dict[str, Any]) -> dict[str, Any]:
    """Ratios in our favour, of figures that both have."""
    found: dict[str, Any] = {}
    for key in ours:
        if key in peer:
            lower = key.endswith("_us") or key.startswith("bytes")
            found[key] = measure.ratios(ours[key], peer[key], lower_is_better=lower)
    # Theirs includes decoding: the fair ratio is to ours from bytes.
    for key, rate in peer.items():
        verb, _, rest = key.partition("_")
        raw = f"{verb}_raw_{rest}"
        if raw in ours:
            found[raw] = measure.ratios(ours[raw], rate, lower_is_better=False)
    return found


def _run_part(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Figures of one part, from a process of its own. Raises CalledProcessError."""
    command = [sys.executable, "-m", "bench.router", "--part", name]
    command += [f"--{flag}" for flag in ("no-peer", "unpinned") if _is_set(args, flag)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    part: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return part


def _is_set(args: argparse.Namespace, flag: str) -> bool:
    return bool(getattr(args, flag.replace("-", "_")))


def _merge(into: dict[str, Any], values: dict[str, Any]) -> None:
    for key, value in values.items():
        if isinstance(value, dict):
            _merge(into.setdefault(key, {}), value)
        else:
            into[key] = value


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            found |= _flat(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = value
    return found


def _print_table(ours: dict[str, Any], peer: dict[str, Any], ratio: dict[str, Any]) -> None:
    columns = [_flat(each) for each in (ours, peer, ratio)]
    print(f"{'':>40} {'ours':>12} {'peer':>12} {'ratio':>8}", file=sys.stderr)
    for key in dict.fromkeys([*columns[0], *columns[1]]):
        cells = [_cell(column.get(key)) for column in columns]
        print(f"{key:>40} {cells[0]:>12} {cells[1]:>12} {cells[2]:>8}", file=sys.stderr)


def _cell(value: Any) -> str:
    return "" if value is None else f"{measure.rounded(value):,}"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="tiny sizes in one process: does it run at all"
    )
    parser.add_argument("--no-peer", action="store_true", help="ours alone")
    parser.add_argument("--unpinned", action="store_true", help="let threads use every core")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    args = _arguments()
    version = None if args.no_peer else dynamo.version()
    scale = QUICK if args.quick else Scale()
    if not args.unpinned:
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    if args.part:
        print(json.dumps(PARTS[args.part](scale, version is not None)))
        return 0
    ours: dict[str, Any] = {}
    peer: dict[str, Any] = {}
    for name in args.only:
        part = PARTS[name](scale, version is not None) if args.quick else _run_part(name, args)
        _merge(ours, part.get("ours", {}))
        _merge(peer, part.get("peer", {}))
    ratio = _ratios(ours, peer)
    _print_table(ours, peer, ratio)
    result = ours | {"peer": peer, "ratio": ratio}
    result |= {
        "peer_version": version,
        "pinned": not args.unpinned,
        "workers": scale.workers,
        **measure.machine(),
    }
    print(json.dumps(measure.rounded(result)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
