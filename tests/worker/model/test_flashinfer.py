"""The FlashInfer backend: over an emulation of the package on the CPU, and the package itself on a GPU.

The emulation says that our plans are right, not that the package's kernels are: cases marked `gpu` ask those.
"""

import gc
import logging
import re
import sys
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bench.doubles.attention import attend_plain
from bench.doubles.quantized import with_kv_scales
from bench.doubles.random_model import random_model
from mallee.protocol.errors import ConfigError
from mallee.worker.forward import Row
from mallee.worker.model.attention.flashinfer import (
    SPLIT_TOKENS,
    FlashInferAttention,
    FlashInferUnavailable,
    Parts,
    find_flashinfer,
)
from mallee.worker.model.attention.torch import TorchAttention
from mallee.worker.model.backend import choose_backend
from mallee.worker.model.parity.tolerance import TOLERANCES
from mallee.worker.model.plan import make_plan
from support import flashinfer_emulator
from support.attention_rows import batches, forked, make_row
from support.forward_schedule import run_schedule
from support.splits import WatchedAttention, block_reads, watch_splits

SCALE = 0.11
SHAPES = [(8, 2, 64), (4, 4, 64), (6, 2, 128), (10, 2, 64), (3, 1, 256)]
"""Query heads, key heads, head_dim: groups of 4, 1, 3, 5 and 3."""
FP8 = torch.float8_e4m3fn


class Kernels(NamedTuple):
    """FlashInfer, or its emulation, and the device that it runs on."""

    package: Any
    device: str

    def attention(
        self,
        shape: tuple[int, int, int] = SHAPES[0],
        *,
        block_size: int = 16,
        dtype: torch.dtype = torch.bfloat16,
        kv_dtype: torch.dtype | None = None,
        **options: Any,
    ) -> FlashInferAttention:
        heads, kv_heads, dim = shape
        return FlashInferAttention(
            self.package,
            device=self.device,
            dtype=dtype,
            kv_dtype=kv_dtype or dtype,
            block_size=block_size,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=dim,
            **options,
        )


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("cpu", id="emulated"),
        pytest.param("cuda", id="flashinfer", marks=pytest.mark.gpu),
    ],
)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    if request.param == "cpu":
        return Kernels(flashinfer_emulator, "cpu")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    try:
        return Kernels(find_flashinfer("cuda"), "cuda")
    except FlashInferUnavailable as e:
        pytest.skip(str(e))


EMULATED = Kernels(flashinfer_emulator, "cpu")


def random_kv(
    num_slots: int, shape: tuple[int, int, int], dtype: torch.dtype, device: str, seed: int = 1
) -> torch.Tensor:
    kv = torch.randn(num_slots, 2, *shape[1:], generator=torch.Generator().manual_seed(seed))
    return kv.to(dtype).to(device)


def random_q(n: int, shape: tuple[int, int, int], dtype: torch.dtype, device: str) -> torch.Tensor:
    """As the decoder gives it: a part of the queries and keys side by side."""
    generator = torch.Generator().manual_seed(n)
    qk = torch.randn(n, shape[0] + shape[1], shape[2], generator=generator)
    return qk.to(dtype).to(device)[:, : shape[0]]


class Case(NamedTuple):
    """Rows over random memory."""

    rows: list[Row]
    size: int
    shape: tuple[int, int, int] = SHAPES[0]
    window: int | None = None
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype | None = None

    def reads(self, attention: Any) -> Parts:
        plan = make_plan(
            self.rows,
            block_size=self.size,
            device="cpu",
            prepare=attention.prepare,
            windows=(self.window,),
            min_saving=attention.min_saving,
        )
        return plan.reads[self.window]

    def attend(self, attention: Any, device: str) -> tuple[torch.Tensor, torch.Tensor]:
        """The backend's output, and the plain form's."""
        num_slots = self.size * (1 + max(int(row.table.max()) for row in self.rows))
        memory = random_kv(num_slots, self.shape, self.kv_dtype or self.dtype, device)
        q = random_q(sum(len(row.tokens) for row in self.rows), self.shape, self.dtype, device)
        with torch.inference_mode():
            ours = attention.attend(self.reads(attention), q, memory, scale=SCALE)
            plain = attend_plain(
                self.rows, q, memory.float(), self.size, scale=SCALE, window=self.window
            )
        return ours.cpu(), plain.cpu()

    def check(self, attention: Any, device: str) -> None:
        ours, plain = self.attend(attention, device)
        assert ours.dtype == self.dtype
        torch.testing.assert_close(ours, plain, atol=1e-2, rtol=1e-2)


CASES = st.builds(
    lambda batch, *more: Case(*batch, *more),
    batches([1, 4, 16, 32], [1, 1, 1, 2, 7, 17, 40], longest=8),
    st.sampled_from(SHAPES),
    st.sampled_from([None, None, 1, 20, 64, 500]),
    st.sampled_from([torch.bfloat16, torch.float16]),
    st.sampled_from([None, FP8]),
)


@pytest.mark.slow
@given(CASES, st.sampled_from([1, 40, 10_000]), st.booleans())
def test_plans_agree_with_the_plain_form(
    kernels: Kernels, case: Case, min_shared_tokens: int, is_deterministic: bool
) -> None:
    """D8, part: random page tables, prefixes at several depths, chunks, windows, groups, FP8 KV; 1e-2.

    On a GPU in bfloat16 alone: other types would compile for half an hour.
    """
    if kernels.device != "cpu":
        case = case._replace(dtype=torch.bfloat16, kv_dtype=None)
    attention = kernels.attention(
        case.shape,
        block_size=case.size,
        dtype=case.dtype,
        kv_dtype=case.kv_dtype,
        windows=(case.window,),
        is_deterministic=is_deterministic,
        min_shared_tokens=min_shared_tokens,
    )
    case.check(attention, kernels.device)


def nested() -> list[Row]:
    """A root under three middles of three forks each, in any order."""
    middles = [[100 + 40 * i + j for j in range(40)] for i in range(3)]
    tables = [[*range(64), *middles[i // 3], 300 + 10 * i] for i in range(9)]
    order = np.random.default_rng(3).permutation(9)
    return [make_row(tables[i], 104 * 16 + 1, 1) for i in order]


@pytest.mark.parametrize(
    ("rows", "num_shared"),
    [
        *((forked(9, shared=20, own=3, n=n, size=16), 20) for n in (1, 5, 40)),
        (nested(), 64 + 3 * 40),
    ],
)
def test_a_shared_prefix_gives_what_flat_reading_gives(
    kernels: Kernels, rows: list[Row], num_shared: int
) -> None:
    """D7, part: merged by log-sum-exp, depth by depth, against every row reading all its keys; bf16 1e-2.

    Each prefix is read once. In deterministic mode nothing is read together.
    """
    case = Case(rows, 16)
    cascade = kernels.attention(min_shared_tokens=64)
    flat = kernels.attention(min_shared_tokens=64, is_deterministic=True)
    watched, apart = WatchedAttention(cascade), WatchedAttention(flat)
    assert case.reads(watched).shared is not None
    assert case.reads(apart).shared is None
    if len(rows[0].tokens) == 1:
        depth = 20 if num_shared == 20 else 104
        num_flat = sum(row.start // 16 + 1 for row in rows)
        assert block_reads(watched.splits[0]) == num_shared + num_flat - depth * len(rows)
        assert block_reads(apart.splits[0]) == num_flat
    outputs = [case.attend(attention, kernels.device)[0] for attention in (cascade, flat)]
    torch.testing.assert_close(*outputs, atol=1e-2, rtol=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("window", [None, 300])
def test_a_row_s_bits_do_not_depend_on_its_batch(
    kernels: Kernels, shape: tuple[int, int, int], window: int | None
) -> None:
    """D8, part: in deterministic mode a decode and chunks of several lengths, alone and among others."""
    rows = [
        make_row(list(range(160 * i, 160 * i + 160)), 2100 + 27 * i, n)
        for i, n in enumerate([1, 3, 20, 60, 1, 1, 200])
    ]
    fixed = kernels.attention(shape, windows=(window,), is_deterministic=True)
    free = kernels.attention(shape, windows=(window,))
    num_slots = 16 * 160 * len(rows)
    memory = random_kv(num_slots, shape, torch.bfloat16, kernels.device)
    q = random_q(sum(len(row.tokens) for row in rows), shape, torch.bfloat16, kernels.device)
    is_equal = []
    for attention in (fixed, free):
        case = Case(rows, 16, shape, window)
        together = attention.attend(case.reads(attention), q, memory, scale=SCALE)
        begin, bits = 0, []
        for row in rows:
            own = q[begin : begin + len(row.tokens)]
            case = Case([row], 16, shape, window)
            alone = attention.attend(case.reads(attention), own, memory, scale=SCALE)
            bits.append(torch.equal(alone, together[begin : begin + len(own)]))
            begin += len(own)
        is_equal.append(bits)
    assert all(is_equal[0])
    if kernels.device == "cpu" and window is None:  # the emulation would show it if plans were free
        assert not all(is_equal[1])


HOPPER = (9, 0)
LONG = [130, 1, 5, 200, 1, 128]


def long_rows() -> list[Row]:
    """Chunks of `LONG` tokens over other blocks each, after as many of the same prefix."""
    tables = [[*range(4), *range(10 + 20 * i, 30 + 20 * i)] for i in range(len(LONG))]
    return [
        make_row(table, 64 + 3 * i, n)
        for i, (table, n) in enumerate(zip(tables, LONG, strict=True))
    ]


@pytest.mark.slow
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[2], SHAPES[4]])
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("is_deterministic", [False, True])
def test_long_segments_are_computed_by_fa3(
    kernels: Kernels, shape: tuple[int, int, int], window: int | None, is_deterministic: bool
) -> None:
    """D8, part: beside rows of one token and short chunks, and merged with what they share.

    A row's bits don't depend on its batch in deterministic mode.
    """
    attention = kernels.attention(
        shape,
        windows=(window,),
        is_deterministic=is_deterministic,
        min_shared_tokens=64,
        capability=HOPPER,
    )
    if kernels.device == "cuda" and torch.cuda.get_device_capability() != HOPPER:
        pytest.skip("fa3 is for Hopper")
    assert attention.label == "FlashInfer, segments from 128 tokens on by fa3"
    rows = long_rows()
    Case(rows, 16, shape, window).check(attention, kernels.device)
    if not is_deterministic:
        return
    memory = random_kv(16 * 200, shape, torch.bfloat16, kernels.device)
    q = random_q(sum(LONG), shape, torch.bfloat16, kernels.device)
    with torch.inference_mode():  # as before: FlashInfer writes to what it made in an earlier plan
        case = Case(rows, 16, shape, window)
        together = attention.attend(case.reads(attention), q, memory, scale=SCALE)
        begin = 0
        for row, n in zip(rows, LONG, strict=True):
            own, case = slice(begin, begin + n), Case([row], 16, shape, window)
            alone = attention.attend(case.reads(attention), q[own], memory, scale=SCALE)
            assert torch.equal(alone, together[own])
            begin += n


class Refusing:
    """FlashInfer, whose fa3 can't be planned, or is wrong."""

    def __init__(self, message: str) -> None:
        self._message = message
        self.num_tried = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(flashinfer_emulator, name)

    def BatchPrefillWithPagedKVCacheWrapper(self, *args: Any, backend: str) -> Any:
        found = flashinfer_emulator.BatchPrefillWithPagedKVCacheWrapper(*args, backend=backend)
        if backend == "fa3":
            self.num_tried += 1
            found.plan = self._refuse if self._message else found.plan
            found.run = self._nothing
        return found

    def _refuse(self, *args: Any, **options: Any) -> None:
        raise RuntimeError(self._message)

    def _nothing(self, q: torch.Tensor, kv: Any, *, out: torch.Tensor, **options: Any) -> Any:
        if "lse" in options:
            options["lse"].fill_(100)  # all of it counts
        return out.zero_()


class Clock:
    """Tells the given times of work; the shapes of what the work computed."""

    def __init__(self, times: list[float]) -> None:
        self._times = iter(times)
        self.shapes: list[tuple[int, ...]] = []

    def seconds(self, work: Callable[[], object]) -> float:
        made = work()
        assert isinstance(made, torch.Tensor)
        self.shapes.append(tuple(made.shape))
        return next(self._times)


def test_where_fa3_fails_fa2_computes_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    """A choice between two kernels, once, when a model is loaded."""
    caplog.set_level(logging.INFO)
    for message, says in (
        ("no nvcc", r"fa3 doesn't run here \(no nvcc\)"),
        ("", "fa3 is wrong by [.0-9]+ of"),
    ):
        caplog.clear()
        package = Refusing(message)
        attention = Kernels(package, "cpu").attention(capability=HOPPER)
        assert package.num_tried
        assert re.search(f"FlashInfer, by fa2: {says}", attention.label)
        (record,) = [each for each in caplog.records if each.levelno == logging.WARNING]
        assert re.search(f"prompts on cpu are computed by fa2: {says}", record.message)
        Case(long_rows(), 16).check(attention, "cpu")
    for fa2_s, fa3_s, label in (
        (3e-4, 2e-4, "FlashInfer, segments from 128 tokens on by fa3"),
        (3e-4, 4e-4, "FlashInfer, by fa2: fa3 takes 400 us for a chunk, fa2 300"),
    ):
        clock = Clock([fa2_s, fa3_s])
        attention = EMULATED.attention(capability=HOPPER, seconds=clock.seconds)
        assert attention.label == label
        assert clock.shapes == [(512, 8, 64)] * 2
    for options, says in (
        ({"kv_dtype": FP8, "capability": HOPPER}, "fa3 reads no KV in torch.float8_e4m3fn"),
        ({"capability": (8, 0)}, "fa3 is for compute capability 9.0"),
    ):
        caplog.clear()
        attention = EMULATED.attention(**options)
        assert says in attention.label
        assert [each.levelno for each in caplog.records] == [logging.INFO], "no fault"


def test_the_workspace_grows_with_the_splits_of_long_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mallee.worker.model.attention.flashinfer.WORKSPACE_NBYTES", 1 << 17)
    attention = EMULATED.attention(is_deterministic=True)
    short = Case([make_row(list(range(9)), 140, 1)], 16)
    table = list(range(SPLIT_TOKENS // 4))
    long = Case([make_row(table, 16 * len(table) - 1 - i, 1) for i in range(3)], 16)
    before = short.reads(attention)
    long.check(attention, "cpu")
    short.check(attention, "cpu")
    q = random_q(1, short.shape, torch.bfloat16, "cpu")
    memory = random_kv(16 * 9, short.shape, torch.bfloat16, "cpu")
    attention.attend(before, q, memory, scale=SCALE)  # planned in the smaller one


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "kv_dtype", "is_deterministic"),
    [
        ("llama", "auto", False),
        ("llama", "fp8", True),
        ("qwen3", "fp8", False),
        ("qwen3", "scaled fp8", True),
        ("gemma3_text", "auto", True),
        ("gemma3_text", "scaled fp8", False),
    ],
)
def test_a_model_gives_the_reference_s_logits(
    kernels: Kernels,
    family: str,
    kv_dtype: str,
    is_deterministic: bool,
    sequences: Callable[..., Any],
) -> None:
    """D7, part, D8, part, D31, part: prompts, chunks, forks and decodes of whole models.

    A step plans for all windows of Gemma before its first layer runs, and each plan lasts the step.
    """
    model = random_model(family, 3, head_dim=64)
    if kv_dtype == "scaled fp8":
        model = with_kv_scales(model)
    options: dict[str, Any] = {
        "dtype": "bfloat16",
        "kv_dtype": kv_dtype.removeprefix("scaled "),
        "block_size": 8,
        "num_blocks": 200,
    }
    reference = run_schedule(sequences(model.forward(**options, uses_kernels=False)), 5)
    forward = model.forward(
        **options,
        device=kernels.device,
        is_deterministic=is_deterministic,
        flashinfer=kernels.package,
    )
    assert isinstance(forward._attention, FlashInferAttention)
    if not is_deterministic:
        forward._attention.min_saving = 2
    splits = watch_splits(forward)
    ours = run_schedule(sequences(forward), 5)
    assert any(split.shared for split in splits) != is_deterministic
    found, expected = torch.stack(ours), torch.stack(reference)
    assert float((found - expected).abs().max()) < TOLERANCES["bfloat16"].logits
    assert float((found - expected).norm() / expected.norm()) < 4e-2


def test_the_backend_is_chosen_where_it_fits_and_nothing_stands_in_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """X29, part: on CUDA a model that FlashInfer can't compute is refused with the remedy, unless torch's
    operations are asked for.
    """
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    config = random_model(head_dim=64).config
    half: dict[str, Any] = {
        "dtype": torch.bfloat16,
        "kv_dtype": torch.bfloat16,
        "block_size": 16,
        "flashinfer": flashinfer_emulator,
    }
    chosen = choose_backend(config, device="cpu", **half).attention
    assert isinstance(chosen, FlashInferAttention)
    narrow = choose_backend(config, device="cpu", **{**half, "kv_dtype": FP8})
    assert isinstance(narrow.attention, FlashInferAttention)
    single = {**half, "dtype": torch.float32, "kv_dtype": torch.float32}
    odd = random_model(head_dim=32).config
    for own, options, says in (
        (config, single, "doesn't compute in torch.float32; give dtype bfloat16"),
        (config, {**half, "kv_dtype": torch.float32}, "give kv_dtype auto or fp8"),
        (odd, half, r"no kernels for head_dim 32, only for \(64, 128, 256\)"),
        (config, {**half, "flashinfer": None}, r"is not installed.*mallee\[serve,cuda\]'"),
    ):
        remedy = "or set engine.attention: torch"
        with pytest.raises(ConfigError, match=f"device='cuda': .*{says}.*{remedy}"):
            choose_backend(own, device="cuda", **options)
        with pytest.raises(ConfigError, match=f"{says}.*; deterministic=True needs it"):
            choose_backend(own, device="cuda", is_deterministic=True, **options)
        plain = choose_backend(own, device="cuda", uses_kernels=False, **options)
        assert isinstance(plain.attention, TorchAttention)
    with pytest.raises(ConfigError, match="deterministic=True needs FlashInfer"):
        choose_backend(config, device="cpu", is_deterministic=True, **{**half, "flashinfer": None})


@pytest.mark.parametrize("error", [RuntimeError("ninja: build stopped"), torch.OutOfMemoryError()])
def test_kernels_that_can_t_be_built_end_the_start(
    monkeypatch: pytest.MonkeyPatch, error: RuntimeError
) -> None:
    """Too little memory is told as that."""

    def fail(*args: Any, **options: Any) -> None:
        raise error

    monkeypatch.setattr(flashinfer_emulator.BatchPrefillWithPagedKVCacheWrapper, "plan", fail)
    if isinstance(error, torch.OutOfMemoryError):
        with pytest.raises(torch.OutOfMemoryError):
            EMULATED.attention()
    else:
        with pytest.raises(FlashInferUnavailable, match=r"ninja: build stopped.*mallee doctor"):
            EMULATED.attention()


@pytest.mark.slow
def test_a_dropped_model_frees_its_plans() -> None:
    """Nothing that a backend made refers to itself in circles: workspaces are large."""
    attention = EMULATED.attention()
    reads = Case(forked(3, shared=2, own=1, size=16), 16).reads(attention)
    gc.collect()
    gc.disable()
    try:
        workspace = weakref.ref(attention.workspace)
        del attention, reads
        assert workspace() is None
    finally:
        gc.enable()
