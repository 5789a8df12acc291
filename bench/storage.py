"""A volume on disk beside `dd` with a sync of the same bytes, and beside plain reads of them.

    python -m bench.storage [--folder DIR] [--mib 512] [--block-kib 720] [--puts 5000] [--rounds 5]

Sides take turns on the same file system. The last line is one JSON object; speeds are medians in MB/s (10^6),
ratios are medians of each round's. "cached" reads find the bytes in the page cache, "cold" ones don't.
"""

import argparse
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from bench.measure import machine, rounded, seconds
from mallee.worker.storage.files import CATALOGUE, Directory
from mallee.worker.storage.volume import Volume, VolumeConfig

IDENTITY = {"weights": "bench"}


def opened(folder: Path, block_nbytes: int) -> Volume:
    return Volume.open(Directory(folder), IDENTITY, block_nbytes, VolumeConfig(1 << 50))


def dd(source: Path, target: Path) -> None:
    command = ["dd", f"if={source}", f"of={target}", "bs=4M", "conv=fdatasync"]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)


def forget(paths: list[Path]) -> None:
    """Take the files, which are synced, out of the page cache."""
    for path in paths:
        file = os.open(path, os.O_RDONLY)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def read_plainly(path: Path, into: memoryview) -> None:
    with path.open("rb", buffering=0) as file:
        done = 0
        while done < len(into):
            done += file.readinto(into[done:]) or 0


def figures(folder: Path, *, nbytes: int, block_nbytes: int, rounds: int) -> dict[str, Any]:
    """Speeds of a capsule of `nbytes`, written, committed and read back in `folder`."""
    num = nbytes // block_nbytes
    nbytes = num * block_nbytes
    rows = np.random.default_rng(0).integers(0, 256, (num, block_nbytes), np.uint8)
    into = np.zeros_like(rows)
    plain = memoryview(into).cast("B")
    keys = list(range(1, num + 1))
    source = Path(tempfile.mkdtemp(dir="/dev/shm")) / "bytes"
    source.write_bytes(rows.tobytes())
    speeds: dict[str, list[float]] = {}

    def note(name: str, taken_s: float) -> None:
        speeds.setdefault(name, []).append(nbytes / taken_s / 1e6)

    def write() -> None:
        volume.put(keys, rows)
        volume.commit("c", b"record", keys)

    def read() -> None:
        assert volume.get(keys, into).num_blocks == num

    for i in range(rounds + 1):  # the first warms up
        copy = folder / f"dd{i}"
        taken_s = seconds(lambda to=copy: dd(source, to))  # type: ignore[misc]
        if i:
            note("dd_fdatasync", taken_s)
        volume = opened(folder / f"volume{i}", block_nbytes)
        taken_s = seconds(write)
        if i:
            note("put_and_commit", taken_s)
        for kind in ("cached", "cold") if i else ():
            if kind == "cold":
                forget([copy, *(folder / f"volume{i}").glob("blocks-*")])
            note(f"plain_read_{kind}", seconds(lambda of=copy: read_plainly(of, plain)))  # type: ignore[misc]
            note(f"read_and_verify_{kind}", seconds(read))
        assert (into == rows).all() or not i
        volume.close()
        copy.unlink()
        shutil.rmtree(folder / f"volume{i}")
    shutil.rmtree(source.parent)
    pairs = {
        "write": ("put_and_commit", "dd_fdatasync"),
        "read_cached": ("read_and_verify_cached", "plain_read_cached"),
        "read_cold": ("read_and_verify_cold", "plain_read_cold"),
    }
    ratios = {
        name: median(a / b for a, b in zip(speeds[ours], speeds[plain], strict=True))
        for name, (ours, plain) in pairs.items()
    }
    return {
        "mb": nbytes / 1e6,
        "block_nbytes": block_nbytes,
        "mb_per_s": {name: median(each) for name, each in speeds.items()},
        "ratios": ratios,
        "all_ratios_of_write": [
            a / b for a, b in zip(speeds["put_and_commit"], speeds["dd_fdatasync"], strict=True)
        ],
    }


def opening(folder: Path, *, num_puts: int, blocks_per_put: int = 64) -> dict[str, float]:
    """Seconds to open a volume of many tiny blocks, all of them synced."""
    volume = opened(folder, 64)
    row = np.zeros((blocks_per_put, 64), np.uint8)
    for i in range(num_puts):
        volume.put(list(range(1 + i * blocks_per_put, 1 + (i + 1) * blocks_per_put)), row)
    volume.commit("c", b"", [1])
    volume.close()

    def again() -> None:
        nonlocal volume
        volume = opened(folder, 64)

    cached = []
    for _ in range(3):
        cached.append(seconds(again))
        volume.close()
    forget([folder / CATALOGUE])
    cold_s = seconds(again)
    num_blocks = len(volume.keys())
    volume.close()
    shutil.rmtree(folder)
    return {"blocks": num_blocks, "cached_s": median(cached), "cold_s": cold_s}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, help="on the file system to measure")
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--block-kib", type=int, default=720)  # SmolLM2-135M, 16 tokens, float32
    parser.add_argument("--puts", type=int, default=5000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        found = {
            **figures(
                folder,
                nbytes=options.mib << 20,
                block_nbytes=options.block_kib << 10,
                rounds=options.rounds,
            ),
            "open": opening(folder / "many", num_puts=options.puts),
            **machine(),
        }
    finally:
        shutil.rmtree(folder)
    print(json.dumps(rounded(found)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
