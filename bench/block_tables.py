"""Block tables in device memory, in unified memory and in pinned host memory: what a step pays for each.

    python -m bench.block_tables [--any-device] [--rows 64] [--context 8192] [--layers 32] [--steps 50]

Made for a GB10, whose processor and GPU share their memory: elsewhere it prints why it is skipped, and
on another CUDA device runs with `--any-device`. A step of decodes, as by an engine with page tables: the
scheduler writes the entries of the blocks that rows have filled, then every layer reads the whole table and
gathers a slice of KV by it.

    device_whole    the table is kept on the host and copied to the device, whole, at each step
    device_entries  only the new entries are copied, and put into the table on the device
    unified         managed memory: the host writes the entries, kernels read them there
    pinned          mapped host memory: the same without pages that move

Placements take turns, every one reads the same bytes, and the sums of what they gather must be equal. The
last line is one JSON object: microseconds a step, medians; `skipped` has the reason where there is none.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from ctypes import CDLL, byref, c_size_t, c_uint, c_void_p
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import torch

from bench import measure

BLOCK_TOKENS: Final = 16
SLICE_BYTES: Final = (
    256  # of a block that a layer gathers: the table is what is measured, not the KV
)
RUNTIMES: Final = ("libcudart.so.13", "libcudart.so.12", "libcudart.so")
ATTACH_GLOBAL: Final = 1
HOST_MAPPED: Final = 2


class Shape(NamedTuple):
    """`rows` decodes of `context` tokens; `layers` reads of the table in a step."""

    rows: int
    context: int
    layers: int

    @property
    def blocks(self) -> int:
        return self.context // BLOCK_TOKENS


class Placement(Protocol):
    """One way to keep the table, int32 of [rows, blocks]."""

    def write(self, rows: np.ndarray, places: np.ndarray, blocks: np.ndarray) -> None:
        """Put `blocks` at [rows, places]; kernels that start later read them."""
        ...

    @property
    def table(self) -> torch.Tensor:
        """As kernels read it."""
        ...


class DeviceWhole:
    """A host copy, sent to the device whole."""

    def __init__(self, first: np.ndarray, device: torch.device) -> None:
        self._host = torch.from_numpy(first.copy())
        if device.type == "cuda":
            self._host = self._host.pin_memory()
        self._view = self._host.numpy()
        self.table = self._host.to(device, copy=True)

    def write(self, rows: np.ndarray, places: np.ndarray, blocks: np.ndarray) -> None:
        self._view[rows, places] = blocks
        self.table.copy_(self._host, non_blocking=True)


class DeviceEntries:
    """The table on the device, to which entries are sent."""

    def __init__(self, first: np.ndarray, device: torch.device) -> None:
        self.table = torch.from_numpy(first.copy()).to(device)
        self._width = first.shape[1]

    def write(self, rows: np.ndarray, places: np.ndarray, blocks: np.ndarray) -> None:
        flat = torch.from_numpy(np.stack((rows * self._width + places, blocks)))
        if self.table.device.type == "cuda":
            flat = flat.pin_memory()
        sent = flat.to(self.table.device, non_blocking=True)
        self.table.view(-1).index_copy_(0, sent[0], sent[1].to(torch.int32))


class Shared:
    """Memory that both sides reach: the host writes `view`, kernels read `table`."""

    def __init__(self, view: np.ndarray, table: torch.Tensor, first: np.ndarray) -> None:
        self._view = view
        self.table = table
        self._view[:] = first

    def write(self, rows: np.ndarray, places: np.ndarray, blocks: np.ndarray) -> None:
        self._view[rows, places] = blocks


class _Memory:
    """`pointer` as an array of int32 for whoever asks by CUDA's array interface."""

    def __init__(self, pointer: int, shape: tuple[int, int]) -> None:
        self.__cuda_array_interface__ = {
            "data": (pointer, False),
            "shape": shape,
            "typestr": "<i4",
            "version": 3,
        }


def runtime() -> CDLL:
    """CUDA's runtime, as torch has loaded it. Raises OSError if there is none of a known name."""
    for name in RUNTIMES:
        try:
            return CDLL(name)
        except OSError:
            continue
    raise OSError(f"none of {', '.join(RUNTIMES)} can be loaded")


def shared(kind: str, first: np.ndarray) -> Shared:
    """Managed ("unified") or mapped host ("pinned") memory. Raises RuntimeError with CUDA's code."""
    cuda, pointer = runtime(), c_void_p()
    size = c_size_t(first.nbytes)
    if kind == "unified":
        code = cuda.cudaMallocManaged(byref(pointer), size, c_uint(ATTACH_GLOBAL))
    else:
        code = cuda.cudaHostAlloc(byref(pointer), size, c_uint(HOST_MAPPED))
    if code or not pointer.value:
        raise RuntimeError(f"CUDA refused {first.nbytes} bytes of {kind} memory: error {code}")
    from ctypes import POINTER, c_int32, cast

    view = np.ctypeslib.as_array(cast(pointer, POINTER(c_int32)), shape=first.shape)
    rows, width = first.shape
    table = torch.as_tensor(_Memory(pointer.value, (rows, width)), device="cuda")
    return Shared(view, table, first)


def placements(first: np.ndarray, device: torch.device) -> dict[str, Placement]:
    """All that the device has, each with the same table."""
    found: dict[str, Placement] = {
        "device_whole": DeviceWhole(first, device),
        "device_entries": DeviceEntries(first, device),
    }
    if device.type == "cuda":
        found["unified"] = shared("unified", first)
        found["pinned"] = shared("pinned", first)
    return found


class Times(NamedTuple):
    """Seconds of a step: until the entries are sent, and until every layer has read the table."""

    write_s: float
    step_s: float


class Steps:
    """The same steps for every placement: in each, one of 16 rows has filled a block."""

    def __init__(self, shape: Shape, device: torch.device, seed: int = 0) -> None:
        draw = np.random.default_rng(seed)
        self.shape = shape
        num = shape.rows * shape.blocks
        self.first = draw.permutation(num).astype(np.int32).reshape(shape.rows, shape.blocks)
        self._device = device
        self._kv = torch.arange(num * (SLICE_BYTES // 4), dtype=torch.int32, device=device)
        self._kv = self._kv.view(num, -1) % 1021
        self._draw = draw
        self._wait: Callable[[], None] = (
            torch.cuda.synchronize if device.type == "cuda" else lambda: None
        )

    def entries(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Rows, places in the table and blocks of one step."""
        shape = self.shape
        rows = self._draw.choice(shape.rows, max(1, shape.rows // BLOCK_TOKENS), replace=False)
        places = self._draw.integers(0, shape.blocks, len(rows))
        return rows, places, self._draw.integers(0, shape.rows * shape.blocks, len(rows))

    def run(
        self, placement: Placement, entries: tuple[np.ndarray, np.ndarray, np.ndarray]
    ) -> tuple[Times, int]:
        """The times of a step, and the sum of all that was gathered."""
        self._wait()
        begin = time.perf_counter()
        placement.write(*entries)
        written = time.perf_counter()
        total = torch.zeros((), dtype=torch.int64, device=self._device)
        for _ in range(self.shape.layers):
            total += self._kv.index_select(0, placement.table.view(-1)).sum()
        self._wait()
        ended = time.perf_counter()
        return Times(written - begin, ended - begin), int(total)


def compare(shape: Shape, device: torch.device, num_steps: int) -> dict[str, dict[str, float]]:
    """placement -> microseconds: medians. Raises RuntimeError if one reads another table."""
    steps = Steps(shape, device)
    known = placements(steps.first, device)
    times: dict[str, list[Times]] = {name: [] for name in known}
    for number in range(num_steps + 3):
        entries = steps.entries()
        sums = {}
        for name, placement in known.items():
            taken, sums[name] = steps.run(placement, entries)
            if number >= 3:  # the first warm up
                times[name].append(taken)
        if len(set(sums.values())) > 1:
            raise RuntimeError(f"step {number}: placements read different tables: {sums}")
    return {name: _medians(each) for name, each in times.items()}


def _medians(times: Sequence[Times]) -> dict[str, float]:
    return {
        "write_us": 1e6 * statistics.median(each.write_s for each in times),
        "step_us": 1e6 * statistics.median(each.step_s for each in times),
    }


def reason_to_skip(is_cuda: bool, name: str, *, any_device: bool) -> str:
    """The reason not to measure on this device, "" if there is none."""
    if not is_cuda:
        return "no CUDA device: unified and device memory are compared on a GB10"
    if "GB10" not in name and not any_device:
        return f"{name} is no GB10: --any-device measures on it all the same"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--any-device", action="store_true", help="also where it is no GB10")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--context", type=int, default=8192, help="tokens of each row")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--steps", type=int, default=50)
    options = parser.parse_args()
    is_cuda = torch.cuda.is_available()
    name = torch.cuda.get_device_name() if is_cuda else ""
    found: dict[str, Any]
    if reason := reason_to_skip(is_cuda, name, any_device=options.any_device):
        found = {"skipped": reason}
    else:
        shape = Shape(options.rows, options.context, options.layers)
        found = {
            "device": name,
            "shape": shape._asdict(),
            "table_bytes": 4 * shape.rows * shape.blocks,
            "us": compare(shape, torch.device("cuda"), options.steps),
        }
    print(json.dumps(measure.rounded({**found, **measure.machine()})))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
