"""Capsules against computing again, and moves between tiers against plain copies.

    python -m bench.capsule [--rounds 3] [--lengths 512,1024,2048,4096,8000] [--threads 2] [--agents 50]
                            [--model MODEL] [--folder DIR] [--out FILE]

SmolLM2-135M, or `--model`, in bfloat16 on this CPU, one engine in this process, without HTTP. The last line
is one JSON object: medians of the rounds, in seconds and ratios. Of another model only `ttft` is measured,
`nbytes`, what a capsule of each length takes, and `hits`, how much of a shared beginning prompts compute.

    ttft      first token after a prompt and 64 tokens more: all of it computed, and from a capsule on the
              device, in host memory, on disk
    copies    bytes a second of parking and restoring a capsule, against a plain copy in memory, and of
              making one durable, against `dd` with a sync of the same bytes; sides take turns
    others    time between tokens of 8 streams while a capsule is parked and restored beside them
    turns     sessions whose KV is four times the device's take turns of 32 tokens in and 8 out: first
              token of a turn, with host memory below, without, and with a device that holds them all
    swarm     agents that share 3,500 tokens: forks of one capsule against each computing all of it (6 of
              them are measured, the others counted like them)
"""

import argparse
import json
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from bench.capsule.engine import Tiered
from bench.measure import machine, rounded, seconds
from bench.storage import dd
from mallee.protocol.messages import Demote, Generate, Limits, Promote, pack_tokens
from mallee.worker.transfer.values import DISK, HOST

SUFFIX = 64
SHARED, OWN, ANSWER = 3500, 32, 16  # tokens of an agent in the swarm
MEASURED = 6  # agents that compute everything: so many are measured, all others counted like them


def prompt(num: int, seed: int) -> list[int]:
    found: list[int] = np.random.default_rng(seed).integers(1000, 2000, num).tolist()
    return found


def ttft(tiered: Tiered, lengths: list[int], rounds: int) -> dict[str, Any]:
    """First token of a prompt and a suffix, computed, and from a capsule in each tier."""
    found = {}
    for length in lengths:
        runs: dict[str, list[float]] = {"cold": [], "device": [], "host": [], "disk": []}
        for i in range(rounds):
            text, suffix = prompt(length, 10 * length + i), prompt(SUFFIX, i)
            runs["cold"].append(tiered.generate([text + suffix], 1).ttft_s)
            tiered.flood()
            capsule = tiered.prefill(text)
            for name, tier in (("device", 0), ("host", HOST), ("disk", DISK)):
                if tier:
                    tiered.demote(capsule, tier)
                    tiered.flood()
                run = tiered.fork(capsule, [prompt(SUFFIX, 1000 + 3 * i + tier)], 1)
                assert run.num_prefilled == SUFFIX, run.num_prefilled
                runs[name].append(run.ttft_s)
            tiered.release(capsule)
        times = {name: median(each) for name, each in runs.items()}
        speedups = {f"{n}_speedup": times["cold"] / times[n] for n in ("device", "host", "disk")}
        found[str(length)] = times | speedups
    return found


def copies(tiered: Tiered, folder: Path, num_tokens: int, rounds: int) -> dict[str, Any]:
    """Moves of one capsule in bytes a second, and their share of a plain copy's."""
    num_blocks = num_tokens // 16
    nbytes = num_blocks * tiered.block_nbytes
    source = np.ones((num_blocks, tiered.block_nbytes), np.uint8)
    target = np.ones_like(source)
    shares: dict[str, list[float]] = {}
    speeds: dict[str, list[float]] = {}

    def note(name: str, took_s: float, plain_s: float) -> None:
        speeds.setdefault(f"{name}_bytes_s", []).append(nbytes / took_s)
        shares.setdefault(f"{name}_share", []).append(plain_s / took_s)

    for i in range(rounds):
        capsule = tiered.prefill(prompt(num_tokens, 77 + i))
        plain_s = seconds(lambda: np.copyto(target, source))
        speeds.setdefault("memcpy_bytes_s", []).append(nbytes / plain_s)
        note("park", tiered.demote(capsule, HOST), plain_s)
        tiered.flood()
        note("restore", tiered.promote(capsule), plain_s)
        raw = folder / "raw"
        with open("/dev/shm/mallee-bench", "wb") as file:
            file.write(source.tobytes())
        dd_s = seconds(partial(dd, Path("/dev/shm/mallee-bench"), raw))
        Path("/dev/shm/mallee-bench").unlink()
        raw.unlink()
        speeds.setdefault("dd_bytes_s", []).append(nbytes / dd_s)
        note("durable", tiered.demote(capsule, DISK), dd_s)
        tiered.release(capsule)
    medians = {name: median(each) for name, each in (speeds | shares).items()}
    return {"nbytes": nbytes, **medians}


def others(tiered: Tiered, num_tokens: int, rounds: int) -> dict[str, Any]:
    """Time between tokens of 8 streams, alone and beside a capsule that is parked and restored."""
    alone: list[float] = []
    beside: list[float] = []
    for i in range(rounds):
        capsule = tiered.prefill(prompt(num_tokens, 99 + i))
        for gaps, moves in ((alone, False), (beside, True)):
            streams = [
                Generate(f"s{i}{moves}{k}", pack_tokens(prompt(64, k)), Limits(96, ignore_eos=True))
                for k in range(8)
            ]
            later = [Demote(f"d{i}", capsule, HOST)] if moves else []
            gaps += tiered.run(streams, later).gaps_s
            if moves:
                tiered.flood()
                streams = [
                    Generate(f"t{i}{k}", pack_tokens(prompt(64, k)), Limits(96, ignore_eos=True))
                    for k in range(8)
                ]
                gaps += tiered.run(streams, [Promote(f"p{i}", capsule)]).gaps_s
        tiered.release(capsule)
    p99 = [float(np.quantile(each, 0.99)) for each in (alone, beside)]
    p50 = [float(np.quantile(each, 0.5)) for each in (alone, beside)]
    return {
        "alone_p50_s": p50[0],
        "beside_p50_s": p50[1],
        "alone_p99_s": p99[0],
        "beside_p99_s": p99[1],
        "p99_ratio": p99[1] / p99[0],
    }


def turns(folder: Path, threads: int, *, sessions: int, length: int, rounds: int) -> dict[str, Any]:
    """First token of a turn of `sessions`, of which the device holds a quarter."""
    quarter = (length + rounds * 48) * sessions // 4 + 512
    sides = {
        "host": Tiered(
            folder / "turns", num_tokens=quarter, host_tokens=6 * quarter, threads=threads, keeps=64
        ),
        "none": Tiered(
            folder, num_tokens=quarter, host_tokens=0, threads=threads, keeps=64, has_tiers=False
        ),
        "device": Tiered(
            folder,
            num_tokens=5 * quarter,
            host_tokens=0,
            threads=threads,
            keeps=64,
            has_tiers=False,
        ),
    }
    found: dict[str, Any] = {"sessions": sessions, "tokens": length}
    for name, side in sides.items():
        texts = [prompt(length, 500 + i) for i in range(sessions)]
        for text in texts:
            text += side.generate([text], 8).tokens
        firsts, num_prefilled = [], 0
        for i in range(rounds):
            for k, text in enumerate(texts):
                text += prompt(32, 600 + sessions * i + k)
                run = side.generate([text], 8)
                text += run.tokens
                firsts.append(run.ttft_s)
                num_prefilled += run.num_prefilled
        found |= {
            f"{name}_p50_s": median(firsts),
            f"{name}_p99_s": float(np.quantile(firsts, 0.99)),
            f"{name}_prefilled": num_prefilled / len(firsts),
        }
        side.close()
    return found


def swarm(tiered: Tiered, plain: Tiered, agents: int) -> dict[str, Any]:
    """Agents over one context, one after the other: with its capsule, and each by itself."""
    context = prompt(SHARED, 5)
    firsts, totals = [], []
    for i in range(min(agents, MEASURED)):
        run = plain.generate([context + prompt(OWN, 100 + i)], ANSWER)
        firsts.append(run.ttft_s)
        totals.append(run.total_s)
    tiered.flood()
    begin = time.perf_counter()
    capsule = tiered.prefill(context)
    began = time.perf_counter() - begin
    forks = [tiered.fork(capsule, [prompt(OWN, 100 + i)], ANSWER) for i in range(agents)]
    tiered.release(capsule)
    alone = agents * sum(totals) / len(totals)
    shared = began + sum(run.total_s for run in forks)
    return {
        "agents": agents,
        "alone_s": alone,
        "shared_s": shared,
        "end_to_end_speedup": alone / shared,
        "two_agents_speedup": sum(totals[:2]) / (began + sum(r.total_s for r in forks[:2])),
        "cold_activation_s": median(firsts),
        "second_activation_s": median(run.ttft_s for run in forks[1:]),
        "activation_speedup": median(firsts) / median(run.ttft_s for run in forks[1:]),
    }


def hits(tiered: Tiered, num_shared: int) -> dict[str, Any]:
    """Tokens that 64 prompts compute of one beginning; their own ends have 50 to 250 tokens."""
    shared, computed = prompt(num_shared, num_shared), []
    for i in range(64):
        own = prompt(50 + i * 200 // 63, 100 + i)
        computed.append(tiered.generate([shared + own], 1).num_prefilled - len(own))
    tiered.flood()
    return {"first": computed[0], "second": computed[1], "others": max(computed[2:])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--lengths", default="512,1024,2048,4096,8000")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--agents", type=int, default=50)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    lengths = [int(each) for each in args.lengths.split(",")]
    longest = max(*lengths, SHARED)
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        room = longest + 1024
        tiered = Tiered(
            folder / "kv",
            num_tokens=2 * room,
            host_tokens=3 * room,
            threads=args.threads,
            model=args.model,
        )
        found: dict[str, Any] = {"ttft": ttft(tiered, lengths, args.rounds)}
        if args.model == "smollm2":
            found["copies"] = copies(tiered, folder, longest, args.rounds)
            found["others"] = others(tiered, longest, args.rounds)
            found["turns"] = turns(
                folder, args.threads, sessions=8, length=1024, rounds=args.rounds
            )
            plain = Tiered(
                folder, num_tokens=2 * room, host_tokens=0, threads=args.threads, shares=False
            )
            found["swarm"] = {str(n): swarm(tiered, plain, n) for n in sorted({2, args.agents})}
        else:
            groups = tiered.forward.spec.groups
            found["hits"] = {str(n): hits(tiered, n) for n in (600, 3000)}
            found["nbytes"] = {
                str(n): sum(g.num_read(n, 16) * g.nbytes_per_block(16) for g in groups)
                for n in lengths
            }
        tiered.close()
    result = {
        "bench": "capsule",
        **machine(),
        "model": args.model,
        "threads": args.threads,
        **rounded(found),
    }
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
