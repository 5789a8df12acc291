"""Proves the GPU path on this machine: its tests, and every figure that has a target.

    python -m bench.gpu_check [--device cuda] [--tiny] [--no-tests] [--only NAME,...] [--profile FILE]

Prints hardware and versions, runs the tests marked `gpu`, then the benches of `bench/gpu` over random weights
of Llama 3.1 8B's shape; nothing is downloaded. A bench that fails is a row with the reason, and the others go
on. The last line is one JSON object. Exit status: 0, or 1 if a test or a bench failed or a target was missed,
or 2 if there is no device: then it says what is missing. `--tiny --device cpu` runs the same code on tiny
shapes, which proves no figure. `--profile` also measures a coarse grid of steps, for the mocker.
"""

import argparse
import gc
import importlib.metadata
import json
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, Final
from xml.etree import ElementTree

import torch

from bench import ROOT, measure
from bench.gpu import exact, loop, steps, trees
from bench.gpu.shapes import BLOCK_SIZE, FULL, TINY_SCALE, Scale, random_model
from bench.gpu.targets import H200_FLOOR_S, PREFILL_FLOPS, TARGETS, Row, row
from mallee.actors.hosting.memory import memory_use
from mallee.cli.mocker.profile import wait_of
from mallee.mocker.timing.measure import Profiler, Sweep
from mallee.worker.memory.budget import DeviceMemory, Room
from mallee.worker.memory.device import host_memory, probe
from mallee.worker.model.installation import look, missing
from mallee.worker.model.runner import TorchForward

PACKAGES: Final = ("flashinfer-python", "transformers", "safetensors", "numpy")
TESTS_TIMEOUT_S: Final = 1800
TINY_BANDWIDTH_NBYTES: Final = 16 << 20
MAX_ROWS: Final = 256
ALONE_BLOCKS: Final = 64
"""Of a forward that computes one short text at a time."""
TEST_TIMEOUT_S: Final = 900
"""Of one test: the first one compiles kernels."""
PROFILE: Final = Sweep((64, 512, 2048, 6144), (0, 2048, 8192), (1, 8, 32, 64), (128, 1024))
"""Points of the grid on a real device."""


class Check:
    """The benches of one device and scale; each yields rows, and what else it saw goes to `figures`."""

    def __init__(self, device: str, scale: Scale, profile_file: Path | None = None) -> None:
        self.device = device
        self.scale = scale
        self.profile_file = profile_file
        self.is_cuda = torch.device(device).type == "cuda"
        self.is_real = self.is_cuda and scale is FULL
        self.figures: dict[str, Any] = {}
        self.room = Room(
            probe if self.is_cuda else as_device,
            max_rows=MAX_ROWS,
            max_step_tokens=max(scale.prompt, trees.MAX_STEP_TOKENS),
        )
        before = self.room.probe(device)
        self.model = random_model(scale, device)
        self.budget = self.model.budget(self.room, before)
        self.blocks_left = self.budget.kv // self.model.spec.block_nbytes(BLOCK_SIZE)
        self.num_blocks = min(scale.num_blocks, self.blocks_left)

    @cached_property
    def forward(self) -> TorchForward:
        """The engine's, with as much KV as the benches need."""
        forward = self.model.forward(self.num_blocks)
        steps.fill(forward)
        return forward

    def benches(self) -> dict[str, Callable[[], Iterator[Row]]]:
        """By the name of its first row, or of what it looks at."""
        return {
            "memory": self.memory,
            "decode_bf16": self.decode,
            "decode_fp8": self.decode_fp8,
            "prefill": self.prefill,
            "shared_step": self.shared,
            "forks": self.forks,
            "recaptures": self.recaptures,
            "search": self.search,
            "reference_error": self.exact,
            **({} if self.profile_file is None else {"profile": self.profile}),
        }

    def row(self, name: str, measured: float | None, reason: str = "") -> Row:
        return row(name, measured, reason, judges=self.is_real)

    def memory(self) -> Iterator[Row]:
        """The largest steps that the budget was made for, with all the KV that it leaves."""
        forward = self.model.forward(self.blocks_left if self.is_cuda else self.num_blocks)
        forward.forward(
            steps.prompt_batch(forward, min(self.room.max_step_tokens, room_of(forward)))
        )
        rows = steps.decode_rows(steps.tables(forward, MAX_ROWS, 1, 0), 3)
        steps.step_s(forward, rows, 1)
        taken = memory_use(forward.memory_stats(), None)
        assert taken is not None, "Linux tells it"
        self.figures["memory"] = {
            "budget": dict(self.budget.lines()),
            "taken": {name: getattr(taken, name) for name in taken.__struct_fields__},
        }
        limit = int(self.budget.share * self.budget.device.total)
        total = taken.weights + taken.kv + taken.graphs + taken.other
        if self.is_cuda and total > limit:
            raise RuntimeError(f"{total} bytes were taken, the budget is {limit}: {self.budget}")
        yield from ()

    @cached_property
    def bandwidth(self) -> float:
        size = steps.BANDWIDTH_NBYTES if self.is_real else TINY_BANDWIDTH_NBYTES
        return steps.read_bandwidth(self.device, size)

    def decode(self) -> Iterator[Row]:
        whole = loop.alone(self.forward, self.scale)
        found = steps.decode(self.forward, self.scale, self.bandwidth, whole.step_s)
        if self.is_real and "H200" in torch.cuda.get_device_name(self.device):
            found = found._replace(floor_s=H200_FLOOR_S)
        self.figures["decode"] = {
            "step_ms": 1000 * found.step_s,
            "host_gap": whole.host_gap,
            "pass_ms": 1000 * found.pass_s,
            "floor_ms": 1000 * found.floor_s,
            "read_bytes_s": self.bandwidth,
        }
        yield self.row("decode_bf16", found.share)

    def decode_fp8(self) -> Iterator[Row]:
        model = random_model(self.scale, self.device, "fp8-block")
        forward = model.forward(min(self.num_blocks, ALONE_BLOCKS))
        whole = loop.alone(forward, self.scale)
        found = steps.decode(forward, self.scale, self.bandwidth, whole.step_s)
        self.figures["decode_fp8"] = {
            "step_ms": 1000 * found.step_s,
            "host_gap": whole.host_gap,
            "pass_ms": 1000 * found.pass_s,
            "floor_ms": 1000 * found.floor_s,
            "weights": model.weights.nbytes,
        }
        yield self.row("decode_fp8", found.share)

    def prefill(self) -> Iterator[Row]:
        flops = steps.prefill_flops(self.forward, self.scale)
        self.figures["prefill"] = {"tflops": flops / 1e12}
        yield self.row("prefill", flops / PREFILL_FLOPS)

    def shared(self) -> Iterator[Row]:
        branches = loop.forked(self.forward, self.scale, self.scale.shared)
        short = loop.forked(self.forward, self.scale, 1)
        found = steps.shared_attention(self.forward, self.scale)
        self.figures["shared"] = {
            "step_ms": 1000 * branches.step_s,
            "host_gap": branches.host_gap,
            "weights_ms": 1000 * short.step_s,
            "shared_ms": 1000 * found.shared_s,
            "flat_ms": 1000 * found.flat_s,
        }
        yield self.row("shared_step", branches.step_s / short.step_s)
        yield self.row("shared_attention", found.speedup)

    def forks(self) -> Iterator[Row]:
        ours = trees.engine_over(self.forward, self.scale)
        found = trees.forks(ours, self.scale)
        self.figures["forks"] = found._asdict()
        yield self.row("forks", found.tables_ms)
        yield self.row("restore", trees.restore_ms(ours, self.scale))
        ours.engine.close()

    def recaptures(self) -> Iterator[Row]:
        graphs = self.forward.stats().graphs
        self.figures["graphs"] = {"rows": graphs.sizes, "nbytes": graphs.nbytes}
        if not graphs.sizes:
            reason = "no graph won, see the log" if self.is_cuda else "graphs are CUDA's"
            yield self.row("recaptures", None, reason)
            return
        ours = trees.engine_over(self.forward, self.scale)
        found = trees.replays(ours, self.scale)
        self.figures["recaptures"] = found._asdict()
        ours.engine.close()
        if not found.num_replays:
            raise RuntimeError("no step of the forks was a replay")
        yield self.row("recaptures", found.num_captures)

    def search(self) -> Iterator[Row]:
        forked = trees.engine_over(self.forward, self.scale)
        cached, plain = (  # over the same memory, one after the other
            trees.engine_over(
                self.model.forward(self.num_blocks, memories=self.forward._memories),
                self.scale,
                has_tree=False,
                has_cache=has_cache,
            )
            for has_cache in (True, False)
        )
        found = trees.search(forked, cached, plain, self.scale)
        self.figures["search"] = {**found._asdict(), "against_cache": found.against_cache}
        yield self.row("search", found.speedup)
        for ours in (forked, cached, plain):
            ours.engine.close()

    def exact(self) -> Iterator[Row]:
        reference = self.model.forward(min(self.num_blocks, ALONE_BLOCKS), uses_kernels=False)
        yield self.row("reference_error", exact.largest_error(self.forward, reference, self.scale))
        memories = self.forward._memories
        fixed = self.model.forward(
            self.num_blocks, memories=memories, is_deterministic=self.is_cuda
        )
        yield self.row("exact_prompts", exact.num_equal(fixed, self.scale))

    def profile(self) -> Iterator[Row]:
        """A grid of the engine's steps, for `mallee replay --timing`."""
        assert self.profile_file is not None, "the bench runs if there is one"
        forward = self.forward
        sweep = PROFILE if self.is_real else Sweep.quick()
        profiler = Profiler(
            forward,
            sweep.fitted_to(forward.spec.max_model_len, forward.num_blocks, BLOCK_SIZE),
            device=forward if forward.is_beside_host else None,
            wait=wait_of(self.device),
        )
        known = {name: value for name, value in versions().items() if value is not None}
        conditions: dict[str, str | int | float] = {
            **known,
            "model": forward.spec.name,
            "dtype": "bfloat16",
            "device": self.device,
            "block_size": BLOCK_SIZE,
        }
        found = profiler.measure(conditions)
        found.save(self.profile_file)
        self.figures["profile"] = {"file": str(self.profile_file), "jitter": found.jitter}
        yield from ()


def as_device(device: str) -> DeviceMemory:
    """The host's memory, in place of a device's."""
    host = host_memory()
    return DeviceMemory(device, host["MemTotal"], host["MemAvailable"], is_unified=True)


def room_of(forward: TorchForward) -> int:
    """Tokens of one sequence."""
    return min(forward.spec.max_model_len, forward.num_blocks * forward.block_size)


def run(check: Check, only: set[str]) -> tuple[list[Row], list[str]]:
    """All rows, in the order of the targets, and the benches that failed, with the reasons."""
    rows: dict[str, Row] = {}
    failed = []
    for name, bench in check.benches().items():
        if only and name not in only:
            continue
        began = time.perf_counter()
        try:
            for each in bench():
                rows[each.name] = each
        except Exception as error:  # the other rows are wanted all the same
            traceback.print_exc()
            reason = f"it failed: {type(error).__name__}: {error}"
            failed.append(f"{name}: {reason}")
            if name in TARGETS:
                rows[name] = check.row(name, None, reason)
        print(f"{name}: {time.perf_counter() - began:.1f} s", file=sys.stderr, flush=True)
        if check.is_cuda:  # the next bench has the memory of this one
            gc.collect()
            torch.cuda.empty_cache()
    left = {name: check.row(name, None, "it was not run") for name in TARGETS if name not in rows}
    return [(rows | left)[name] for name in TARGETS], failed


# The machine


def versions() -> dict[str, str | None]:
    """Hardware, driver and packages; None for what is not here."""
    is_cuda = torch.cuda.is_available()
    found: dict[str, str | None] = {
        "gpu": torch.cuda.get_device_name() if is_cuda else None,
        "capability": ".".join(map(str, torch.cuda.get_device_capability())) if is_cuda else None,
        "driver": look().driver,
        "cuda": torch.version.cuda,
        "torch": str(torch.__version__),
        **measure.machine(),
    }
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def run_tests(device: str) -> dict[str, Any]:
    """The tests marked `gpu`, and those of the model that take a device."""
    found = {}
    for name, arguments in {
        "gpu": ["tests", "-m", "gpu"],
        "device": ["tests/worker/model/test_device.py"],
    }.items():
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.xml"
            command = [sys.executable, "-m", "pytest", "-q", "-rs", f"--junitxml={report}"]
            command += ["-o", f"timeout={TEST_TIMEOUT_S}"]
            done = subprocess.run(
                [*command, "--device", device, *arguments],
                cwd=ROOT,
                check=False,
                timeout=TESTS_TIMEOUT_S,
                stdout=sys.stderr,
            )
            found[name] = {"status": done.returncode, **counts(report)}
    return found


def counts(report: Path) -> dict[str, int]:
    """Tests of a JUnit report by outcome."""
    suite = ElementTree.parse(report).getroot().find("testsuite")
    assert suite is not None, "a report without a suite"
    return {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes: they prove no figure")
    parser.add_argument("--no-tests", action="store_true", help="run no tests")
    parser.add_argument("--only", default="", help="benches by the name of their first row")
    parser.add_argument(
        "--profile", type=Path, help="write a grid for `mallee replay --timing` there"
    )
    options = parser.parse_args()
    if options.profile is not None and not options.profile.absolute().parent.is_dir():
        parser.error(f"--profile {options.profile}: there is no folder {options.profile.parent}")
    found = versions()
    for key, value in found.items():
        print(f"{key:>20}  {value or 'none'}")
    is_cuda = torch.device(options.device).type == "cuda"
    if is_cuda and not torch.cuda.is_available():
        lacking = missing(look())
        print("\n".join(("this machine has no CUDA device that torch can use:", *lacking)))
        print(json.dumps({"rows": [], "missing": lacking, "versions": found}))
        return 2
    tests = None if options.no_tests else run_tests(options.device)
    check = Check(options.device, TINY_SCALE if options.tiny else FULL, options.profile)
    print(check.budget)
    rows, failed = run(check, set(filter(None, options.only.split(","))))
    for each in rows:
        verdict = {True: "met", False: "MISSED", None: "-"}[each.meets]
        figure = "-" if each.measured is None else f"{each.measured:.4g}"
        print(f"{each.name:>18}  {figure:>10}  {verdict:6}  {each.target}  {each.reason}")
    result = {
        "rows": [each._asdict() for each in rows],
        "failed": failed,
        "tests": tests,
        "figures": check.figures,
        "is_tiny": options.tiny,
        "device": options.device,
        "versions": found,
    }
    print(json.dumps(measure.rounded(result)))
    broken = tests is not None and any(each["status"] not in (0, 5) for each in tests.values())
    return int(bool(failed) or broken or any(each.meets is False for each in rows))


if __name__ == "__main__":
    sys.exit(main())
