"""The benches of one device, in the order of their worth."""

import gc
import logging
import time
import traceback
from collections.abc import Callable, Container, Iterator, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from bench.engine.draws import some_draws
from bench.gpu import exact, loop, steps, trees
from bench.gpu.shapes import BLOCK_SIZE, FULL, Scale, random_model
from bench.gpu.targets import TARGETS, Row, row
from bench.gpu.versions import versions
from mallee.actors.hosting.memory import memory_use
from mallee.cli.profile.command import wait_of
from mallee.mocker.measure import Profiler, Sweep
from mallee.worker.memory.budget import DeviceMemory, Room
from mallee.worker.memory.device import host_memory, probe
from mallee.worker.model.backend import choose_backend
from mallee.worker.model.graphs.decode import GraphOptions
from mallee.worker.model.runner import TorchForward

log = logging.getLogger(__name__)

APART: Final = ("memory", "decode_fp8")
"""Benches for a process of their own: one takes all of the device, and the other's kernels end the process
where CUDA refuses them."""
TINY_BANDWIDTH_NBYTES: Final = 16 << 20
MAX_ROWS: Final = 256
REFERENCE_LAYERS: Final = 8
ALONE_BLOCKS: Final = 64
"""Of a forward that computes one short text at a time."""
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
        graphs = forward.graph_stats()
        self.figures["backend"] = {
            "attention": type(forward._attention).__name__,
            "operations": type(forward.decoder._ops).__name__,
            "graphs": graphs.sizes,
            "graphs_nbytes": graphs.nbytes,
        }
        log.info("computes by %s", self.figures["backend"])
        return forward

    def benches(self) -> dict[str, Callable[[], Iterator[Row]]]:
        """By the name of the first row, or of what it looks at; the most telling first."""
        return {
            "attention_error": self.attention,
            "reference_error": self.reference,
            "golden_tokens": self.golden,
            "decode_bf16": self.decode,
            "shared_step": self.shared,
            "recaptures": self.recaptures,
            "prefill": self.prefill,
            "forks": self.forks,
            "draws": self.draws,
            "exact_prompts": self.exact,
            "search": self.search,
            **({} if self.profile_file is None else {"profile": self.profile}),
            "memory": self.memory,
            "decode_fp8": self.decode_fp8,
        }

    def row(self, name: str, measured: float | None, reason: str = "") -> Row:
        return row(name, measured, reason, judges=self.is_real)

    def attention(self) -> Iterator[Row]:
        config, dtype = self.model.config, torch.bfloat16
        attention = choose_backend(
            config, dtype=dtype, kv_dtype=dtype, device=self.device, block_size=BLOCK_SIZE
        ).attention  # without a forward, whose graphs take their time
        errors = exact.attention_errors(attention, config, BLOCK_SIZE, self.device)
        self.figures["attention_errors"] = errors
        yield self.row("attention_error", max(errors.values()))

    def reference(self) -> Iterator[Row]:
        scale = self.scale.shallow(REFERENCE_LAYERS)  # beside the whole model float32 has no room
        ours = random_model(scale, self.device).forward(self.exact_blocks, graphs=None)
        theirs = random_model(scale, self.device, dtype="float32").forward(
            self.exact_blocks, uses_kernels=False, graphs=None
        )
        found = exact.distance(ours, theirs, scale)
        self.figures["reference"] = found._asdict()
        yield self.row("reference_error", found.error)

    @property
    def exact_blocks(self) -> int:
        """KV of all prompts of `exact` and their answers."""
        tokens = max(self.scale.exact_tokens, self.scale.error_tokens)
        needed = (-(-(len(each) + tokens) // BLOCK_SIZE) for each in exact.prompts(self.scale))
        return sum(needed)

    def golden(self) -> Iterator[Row]:
        equal, _ = exact.num_golden(self.device)
        yield self.row("golden_tokens", equal)

    def memory(self) -> Iterator[Row]:
        """The largest steps that the budget was made for, with all the KV that it leaves."""
        self._drop_forward()  # beside its KV that of the budget has no room
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

    def _drop_forward(self) -> None:
        self.__dict__.pop("forward", None)
        gc.collect()
        if self.is_cuda:
            torch.cuda.empty_cache()

    @cached_property
    def bandwidth(self) -> float:
        size = steps.BANDWIDTH_NBYTES if self.is_real else TINY_BANDWIDTH_NBYTES
        return steps.read_bandwidth(self.device, size)

    def decode(self) -> Iterator[Row]:
        branches = self.scale.branches
        for name, num, whole in (
            ("decode_bf16", 1, loop.alone(self.forward, self.scale)),
            ("decode_bf16_32", branches, loop.beside(self.forward, self.scale)),
        ):
            yield self._decoded(name, self.forward, whole, num)

    def decode_fp8(self) -> Iterator[Row]:
        self._drop_forward()
        model = random_model(self.scale, self.device, "fp8-block")
        forward = model.forward(min(self.num_blocks, ALONE_BLOCKS))
        yield self._decoded("decode_fp8", forward, loop.alone(forward, self.scale), 1)

    def _decoded(self, name: str, forward: TorchForward, whole: loop.Loop, num: int) -> Row:
        found = steps.decode(forward, self.scale, self.bandwidth, whole.step_s, num)
        self.figures[name] = {
            "step_ms": 1000 * found.step_s,
            "host_gap": whole.host_gap,
            "pass_ms": 1000 * found.pass_s,
            "floor_ms": 1000 * found.floor_s,
            "read_bytes_s": self.bandwidth,
            "weights": forward.decoder.weights.nbytes,
        }
        return self.row(name, found.share)

    def prefill(self) -> Iterator[Row]:
        flops = steps.prefill_flops(self.forward, self.scale)
        rate = steps.product_rate(self.device, 8192 if self.is_real else 256)
        self.figures["prefill"] = {"tflops": flops / 1e12, "product_tflops": rate / 1e12}
        yield self.row("prefill", flops / rate)

    def draws(self) -> Iterator[Row]:
        """The tokens of a step whose logits lie on the device."""
        generator = torch.Generator(self.device).manual_seed(0)
        batch = torch.randn(self.scale.draws, generator=generator, device=self.device).bfloat16()
        times = {}
        for kind in ("greedy", "temperature", "top_p"):
            wanted = some_draws(kind, batch)
            times[kind] = 1000 * steps.median_s(
                self.device, partial(self.forward.sample, wanted), self.scale.repeats
            )
        self.figures["draws_ms"] = times
        yield self.row("draws", times["top_p"])

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
        graphs = self.forward.graph_stats()
        if not graphs.sizes:
            reason = "no graph won, see the log" if self.is_cuda else "graphs are CUDA's"
            yield self.row("replay_error", None, reason)
            yield self.row("recaptures", None, reason)
            return
        eager = self.model.beside(self.forward)
        errors = {
            size: steps.replay_error(self.forward, eager, min(size, MAX_ROWS))
            for size in graphs.sizes
        }
        self.figures["replay_errors"] = errors
        yield self.row("replay_error", max(errors.values()))
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
                self.model.beside(self.forward, graphs=GraphOptions()),
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
        fixed = self.model.beside(self.forward, is_deterministic=self.is_cuda)
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


class Outcome(NamedTuple):
    """Rows by target, and the benches that failed, with the reasons."""

    rows: dict[str, Row]
    failed: list[str]


def run(check: Check, only: Container[str]) -> tuple[list[Row], list[str]]:
    """The benches of these names (all if there are none): all rows, and the benches that failed."""
    outcome = Outcome({}, [])
    for name in check.benches():
        if (not only or name in only) and run_bench(check, name, outcome):
            break
    return all_rows(outcome.rows, judges=check.is_real), outcome.failed


def run_bench(
    check: Check, name: str, outcome: Outcome, keep: Callable[[], None] | None = None
) -> bool:
    """Adds what bench `name` finds to `outcome`, and calls `keep` after each row.

    Whether the device is lost: after a kernel's fault CUDA refuses everything.
    """
    began = time.perf_counter()
    try:
        for each in check.benches()[name]():
            outcome.rows[each.name] = each
            if keep is not None:
                keep()
    except Exception as error:  # the other rows are wanted all the same
        traceback.print_exc()
        reason = f"it failed: {type(error).__name__}: {error}"
        outcome.failed.append(f"{name}: {reason}")
        if name in TARGETS and name not in outcome.rows:
            outcome.rows[name] = check.row(name, None, reason)
    check.figures.setdefault("seconds", {})[name] = time.perf_counter() - began
    log.info("%s: %.1f s", name, time.perf_counter() - began)
    if keep is not None:
        keep()
    gc.collect()  # the next bench has the memory of this one
    if not check.is_cuda:
        return False
    try:
        torch.cuda.synchronize(check.device)
        torch.cuda.empty_cache()
    except RuntimeError as error:
        outcome.failed.append(f"{name}: the device is lost: {error}")
        return True
    return False


def all_rows(
    found: Mapping[str, Row], *, judges: bool, reason: str = "it was not run"
) -> list[Row]:
    """A row for each target, in their order."""
    return [
        found[name] if name in found else row(name, None, reason, judges=judges) for name in TARGETS
    ]
