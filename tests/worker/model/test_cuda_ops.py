"""Small operations by Triton's kernels against those in torch: interpreted on a CPU, compiled on a GPU."""

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bench.doubles.quantized import quantized_model, with_kv_scales
from bench.doubles.random_model import RandomModel, random_model
from mallee.protocol.errors import ConfigError
from mallee.worker.model import ops as torch_ops
from mallee.worker.model import runner
from mallee.worker.model.backend import choose_backend
from mallee.worker.model.config import Activation
from mallee.worker.model.graphs.decode import GraphOptions
from mallee.worker.model.kernels.cuda_ops import CudaOps, KernelWrong, check, choose_ops
from mallee.worker.model.kernels.triton_launch import NoTriton, TritonKernels
from mallee.worker.model.linear.choose import Machine, make_linear
from mallee.worker.model.linear.matrix import Quantized
from mallee.worker.model.linear.plain import Plain
from mallee.worker.model.linear.rounded import RoundedFloat8, Rounding, rounded_rows
from mallee.worker.model.linear.scheme import Scheme
from mallee.worker.model.ops import Ops, Rotation
from mallee.worker.model.runner import TorchForward
from support import flashinfer_emulator
from support.examples import examples
from support.launch_count import LaunchCount
from support.recorded_graphs import RecordedGraphs
from support.triton_interpreter import counting, interpreted

FP8 = torch.float8_e4m3fn
BF16 = torch.bfloat16
FUSED = "mallee.worker.model.kernels.triton.fused"
PLAIN = Ops()


class Kernels(NamedTuple):
    """Compiled or interpreted kernels, and the device that they run on."""

    module: Any
    device: str

    @property
    def ops(self) -> CudaOps:
        return CudaOps(self.triton)

    @property
    def triton(self) -> TritonKernels:
        return TritonKernels(self.module)

    def random(
        self, *shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, scale: float = 1.0
    ) -> torch.Tensor:
        drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        return (drawn * scale).to(self.device, dtype)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("cpu", id="interpreted"),
        pytest.param("cuda", id="compiled", marks=pytest.mark.gpu),
    ],
)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    if request.param == "cpu":
        return Kernels(interpreted(), "cpu")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    from mallee.worker.model.kernels.triton import fused

    return Kernels(fused, "cuda")


def agrees(ours: torch.Tensor, plain: torch.Tensor) -> None:
    """Equal but for the order of sums; in bfloat16 and float8 few may round to the next number.

    Where large numbers cancel, what is left differs by a step of these.
    """
    assert ours.dtype == plain.dtype
    assert ours.shape == plain.shape
    step = {torch.float32: 2e-6, BF16: 2**-7, FP8: 2**-3}[ours.dtype]
    found, expected = ours.float(), plain.float()
    largest = float(expected.abs().max())
    torch.testing.assert_close(found, expected, rtol=0, atol=max(step * largest, 1e-30))
    if ours.dtype != torch.float32:
        num_rounded = int(((found - expected).abs() > 2e-6 * largest).sum())
        assert num_rounded <= max(2, found.numel() // 20)


ROWS = st.sampled_from([1, 2, 7, 31])
WIDTHS = st.sampled_from([16, 80, 576, 640, 1152])
HEADS = st.sampled_from([(1, 1), (4, 2), (6, 6), (9, 3), (14, 2)])
DIMS = st.sampled_from([2, 16, 64, 80, 96, 128, 256])
DTYPES = st.sampled_from([torch.float32, BF16])


@examples(60)
@given(ROWS, WIDTHS, DTYPES, st.booleans(), st.booleans())
def test_a_sum_and_its_norm_are_those_of_torch(
    kernels: Kernels, n: int, width: int, dtype: torch.dtype, is_wide: bool, has_own: bool
) -> None:
    """I7, part: with weights in the model's dtype or in float32, and norms of what is added (Gemma 3)."""
    x, residual = (kernels.random(n, width, seed=i, dtype=dtype, scale=5) for i in range(2))
    kept = torch.float32 if is_wide else dtype
    norm, own = (kernels.random(width, seed=i, dtype=kept) for i in (2, 3))
    agrees(kernels.ops.norm(x, norm, 1e-6), PLAIN.norm(x, norm, 1e-6))
    linear = Plain.view(torch.eye(width, dtype=dtype, device=kernels.device))
    options = {"own_norm": own if has_own else None, "norm": norm, "eps": 1e-6}
    found = kernels.ops.added_norm(linear, x, residual.clone(), **options)
    expected = PLAIN.added_norm(linear, x, residual.clone(), **options)
    agrees(found[0], expected[0])
    agrees(found[1], PLAIN.norm(found[0], norm, 1e-6))


@examples(60)
@given(ROWS, st.sampled_from([1, 40, 1024, 1500]), DTYPES, st.sampled_from(["silu", "gelu_tanh"]))
def test_a_gate_is_torch_s(
    kernels: Kernels, n: int, width: int, dtype: torch.dtype, activation: Activation
) -> None:
    """I7, part: far from 0 too, where an exponential is infinite."""
    gate_up = kernels.random(n, 2 * width, dtype=dtype, scale=30)
    agrees(kernels.ops.gated(gate_up, activation), PLAIN.gated(gate_up, activation))


@examples(60)
@given(
    ROWS,
    HEADS,
    DIMS,
    DTYPES,
    st.booleans(),
    st.sampled_from(["own", "fp8", "scaled fp8"]),
    st.data(),
)
def test_heads_are_turned_and_written_as_by_torch(
    kernels: Kernels,
    n: int,
    heads: tuple[int, int],
    dim: int,
    dtype: torch.dtype,
    has_norm: bool,
    kv: str,
    data: st.DataObject,
) -> None:
    """I7, part, D31, part: norms of heads, FP8 KV, its scales and its range; other slots keep theirs."""
    num_heads, kv_heads = heads
    qkv = kernels.random(n, num_heads + 2 * kv_heads, dim, dtype=dtype, scale=100)
    turn = Rotation(*(kernels.random(n, 1, dim, seed=i, dtype=dtype).sin() for i in (1, 2)))
    seed = data.draw(st.integers(0, 99))
    order = torch.randperm(40, generator=torch.Generator().manual_seed(seed))[: n + 1]
    slots = order.to(kernels.device)[1:]  # not aligned, as a part of a step's numbers
    weight = kernels.random(num_heads + kv_heads, dim, seed=3) if has_norm else None
    scales = kernels.random(2, seed=4).abs() + 0.1 if kv == "scaled fp8" else None
    kept = dtype if kv == "own" else FP8
    memories = [kernels.random(40, 2, kv_heads, dim, seed=5).to(kept) for _ in range(2)]
    before = memories[0].view(torch.uint8).clone()
    turned = [
        ops.place(qkv.clone(), turn, slots, memory, head_norm=weight, eps=1e-6, kv_scales=scales)
        for ops, memory in zip((kernels.ops, PLAIN), memories, strict=True)
    ]
    agrees(*turned)
    agrees(*(memory.view(torch.uint8)[slots].view(kept) for memory in memories))
    untouched = torch.ones(40, dtype=torch.bool, device=kernels.device)
    untouched[slots] = False
    assert torch.equal(memories[0].view(torch.uint8)[untouched], before[untouched])


@pytest.mark.slow
@pytest.mark.parametrize("n", [32, 129])
@pytest.mark.parametrize("operation", ["norm", "gate", "place"])
def test_large_steps_are_those_of_torch(kernels: Kernels, operation: str, n: int) -> None:
    """I7, part: the number of rows is a grid's alone."""
    x, weight = kernels.random(n, 64, dtype=BF16), kernels.random(64, seed=1, dtype=BF16)
    turn = Rotation(*(kernels.random(n, 1, 16, seed=i, dtype=BF16) for i in (2, 3)))
    slots = torch.randperm(n, generator=torch.Generator().manual_seed(4)).to(kernels.device)
    found = []
    for ops in (kernels.ops, PLAIN):
        memory = torch.zeros(n, 2, 1, 16, dtype=BF16, device=kernels.device)
        if operation == "norm":
            found.append(ops.norm(x, weight, 1e-6))
        elif operation == "gate":
            found.append(ops.gated(x, "silu"))
        else:
            ops.place(x.clone().view(n, 4, 16), turn, slots, memory, head_norm=None, eps=1e-6)
            found.append(memory)
    agrees(*found)


@examples(40)
@given(ROWS, st.sampled_from([16, 144, 1024, 3072]), DTYPES, st.sampled_from([0.0, 1e-9, 1.0, 1e4]))
def test_rows_are_rounded_as_by_torch(
    kernels: Kernels, n: int, width: int, dtype: torch.dtype, scale: float
) -> None:
    """I14, part: to float8, each row by its largest number; rows of zeros, too."""
    x = kernels.random(n, width, dtype=dtype, scale=scale)
    x[0] *= 0
    for found, expected in zip(Rounding(kernels.triton)(x), rounded_rows(x, FP8), strict=True):
        agrees(found, expected)


def test_a_product_of_rounded_rows_takes_two_launches() -> None:
    """I14, part: with the matrix's own operation."""
    values = torch.randn(32, 64, generator=torch.Generator().manual_seed(0)).to(FP8)
    matrix = Quantized(values, torch.ones(32, 1), Scheme("float8_e4m3fn", "row", "dynamic"))
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(1)).to(BF16)
    found, num = [], []
    for kernels in (None, TritonKernels(interpreted())):
        with LaunchCount() as count, counting(count):
            found.append(RoundedFloat8(matrix, kernels)(x))
        num.append(count.num)
    assert num == [8, 2]
    agrees(*found)


def test_rounding_in_torch_takes_the_place_of_a_kernel_that_is_wrong(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """I14, part: before the product gives way to one that is many times slower."""
    values = torch.randn(32, 64, generator=torch.Generator().manual_seed(0)).to(FP8)
    matrix = Quantized(values, torch.ones(32, 1), Scheme("float8_e4m3fn", "row", "dynamic"))
    hopper = Machine("cuda", (9, 0))
    monkeypatch.setattr("mallee.worker.model.linear.choose.ROWS", (1, 4))  # each is interpreted
    for module, by in ((interpreted(), "Triton"), (SimpleNamespace(round_rows=Lazy()), "torch")):
        kernels = TritonKernels(SimpleNamespace(**{**vars(module), "TritonError": ValueError}))
        monkeypatch.setattr(TritonKernels, "load", lambda kernels=kernels: kernels)
        assert make_linear([matrix], BF16, hopper).label.endswith(f"rounded by {by}")
    assert "float8 times float8, rounded by Triton is wrong by" in caplog.text


class Lazy:
    """A kernel that does nothing."""

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return lambda *args, **options: None


def test_every_bfloat16_becomes_torch_s_float8(kernels: Kernels) -> None:
    """D31, part: rounded to nearest even, subnormal numbers, both zeros, saturation, infinities, NaN."""
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(BF16).to(kernels.device)
    kv_heads, dim = 16, 4096
    qkv = torch.cat([torch.zeros_like(bits[:dim]), torch.zeros_like(bits), bits]).view(1, -1, dim)
    turn = Rotation(*torch.zeros(2, 1, 1, dim, dtype=BF16, device=kernels.device))
    slots = torch.zeros(1, dtype=torch.int64, device=kernels.device)
    memory = torch.zeros(1, 2, kv_heads, dim, device=kernels.device).to(FP8)
    kernels.ops.place(qkv, turn, slots, memory, head_norm=None, eps=1e-6)
    found = memory[0, 1].view(torch.uint8).flatten()
    expected = bits.clamp(-448, 448).to(FP8).view(torch.uint8)
    is_number = ~bits.isnan()
    assert torch.equal(found[is_number], expected[is_number])
    assert bool(((found[~is_number] & 0x7F) == 0x7F).all())


# Choosing them


def test_kernels_are_tried_before_they_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    """X29, part: kernels that are missing or wrong end a start; torch's operations must be asked for."""
    found = interpreted()
    options: dict[str, Any] = {"dtype": BF16, "kv_dtype": FP8, "device": "cpu"}
    config = quantized_model(random_model("qwen3"), "fp8-row").config
    with pytest.raises(NoTriton, match="no CUDA device is here"):
        choose_ops(config, **options)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, FUSED, found)  # type: ignore[arg-type]
    hybrid = random_model("qwen3_5_text").config
    for own in (config, random_model("llama").config, random_model("gemma3_text").config, hybrid):
        assert type(choose_ops(own, **options)) is CudaOps

    for name in ("norm", "gate", "place", "round_rows", "fold"):
        config = hybrid if name == "fold" else config
        broken = SimpleNamespace(**{**vars(found), name: Lazy()})
        monkeypatch.setitem(sys.modules, FUSED, broken)  # type: ignore[arg-type]
        with pytest.raises(
            NoTriton, match=r"kernels of small operations don't run here: .* wrong by"
        ):
            choose_ops(config, **options)
        with pytest.raises(KernelWrong, match="is wrong by"):
            check(CudaOps(TritonKernels(broken)), config, **options)

    monkeypatch.setitem(sys.modules, FUSED, None)  # type: ignore[arg-type]
    options = {"dtype": BF16, "kv_dtype": BF16, "device": "cuda", "block_size": 16}
    wide = random_model("llama", head_dim=64).config
    says = r"device='cuda': Triton is not installed .* or set engine\.attention: torch"
    with pytest.raises(ConfigError, match=says):
        choose_backend(wide, **options, flashinfer=flashinfer_emulator)
    assert type(choose_backend(wide, **options, uses_kernels=False).ops) is Ops


@examples(12)
@given(
    st.sampled_from([1, 2, 5]),
    st.sampled_from([1, 3]),
    st.sampled_from([(32, 32), (128, 128), (24, 40)]),
)
def test_tokens_are_folded_as_by_torch(
    kernels: Kernels, n: int, heads: int, dims: tuple[int, int]
) -> None:
    """F11, part: slots that are no row's, and those that lie apart, stay; states of any size of head."""
    value_dim, key_dim = dims
    q, k = (kernels.random(n, heads, key_dim, seed=i) for i in range(2))
    pool = kernels.random(2 * n + 1, heads * value_dim * key_dim + 16, seed=3)
    pools = [pool, pool.clone()]
    found = []
    for ops, each in zip((kernels.ops, PLAIN), pools, strict=True):
        matrices = each[:, : heads * value_dim * key_dim].view(-1, heads, value_dim, key_dim)
        answers = ops.fold(
            q,
            torch.nn.functional.normalize(k, dim=-1),
            kernels.random(n, heads, value_dim, seed=2),
            decay=-kernels.random(n, heads, seed=4).abs(),
            rate=kernels.random(n, heads, seed=5).sigmoid(),
            read=torch.arange(n, device=kernels.device),
            written=torch.arange(2 * n, n, -1, device=kernels.device),
            matrices=matrices,
        )
        found.append(answers)
    agrees(found[0], found[1])
    agrees(pools[0], pools[1])


# Whole models

FAMILIES = ("llama", "qwen3", "gemma3_text")


def made(
    monkeypatch: pytest.MonkeyPatch, model: RandomModel, ops: Ops, **options: Any
) -> TorchForward:
    """A forward with `ops` beside FlashInfer's emulation."""

    def choose(*args: Any, **more: Any) -> Any:
        return choose_backend(*args, **more)._replace(ops=ops)

    with monkeypatch.context() as patched:
        patched.setattr(runner, "choose_backend", choose)
        return model.forward(
            **{"dtype": "bfloat16", "block_size": 8, "num_blocks": 200, **options},
            flashinfer=flashinfer_emulator,
        )


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_s_logits_are_those_of_torch_s_operations(
    family: str, sequences: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """I7, part: prompts, a chunk, a fork and decodes, over FP8 KV; products are rounded before sums."""
    shape = {"head_dim": 64, "num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}
    model = with_kv_scales(random_model(family, 3, **shape))
    both = []
    for ops in (CudaOps(TritonKernels(interpreted())), PLAIN):
        run = sequences(made(monkeypatch, model, ops, kv_dtype="fp8"))
        found = run.step(run.row("a", list(range(3, 20))), run.row("b", [7, 8]))
        found += run.step(run.row("a", [9, 4, 5]), run.row("b", [6]))
        copies = run.fork("a", "c")
        found += run.step(run.row("a", [1]), run.row("c", [2]), copies=copies)
        both.append(torch.stack(found).float())
    assert float((both[0] - both[1]).norm() / both[1].norm()) < 4e-2


def launches_of_a_layer(
    monkeypatch: pytest.MonkeyPatch, sequences: Callable[..., Any], family: str, kv: str, ops: Ops
) -> int:
    """In a decode step: the difference between a model of three layers and one of two."""
    num: list[int] = []
    wrappers = (
        flashinfer_emulator.BatchDecodeWithPagedKVCacheWrapper,
        flashinfer_emulator.BatchPrefillWithPagedKVCacheWrapper,
    )
    attends, normed = wrappers[0].run, torch_ops.rms_norm
    for layers in (2, 3):
        shape = {"head_dim": 64, "num_hidden_layers": layers}
        model = random_model(family, **shape, layer_types=["full_attention"] * layers)
        model = with_kv_scales(model) if kv == "scaled fp8" else model
        kept = "auto" if kv == "own" else "fp8"
        run = sequences(made(monkeypatch, model, ops, kv_dtype=kept))
        run.step(run.row("a", [1, 2, 3]))
        count = LaunchCount()

        def attend(*args: Any, count: LaunchCount = count, **more: Any) -> Any:
            return count.one("attention", attends, *args, **more)

        def norm(*args: Any, count: LaunchCount = count) -> Any:  # a kernel of CUDA's
            return count.one("rms_norm", normed, *args)

        with monkeypatch.context() as patched:
            for wrapper in wrappers:
                patched.setattr(wrapper, "run", attend)
            patched.setattr(torch_ops, "rms_norm", norm)
            with count, counting(count):
                run.step(run.row("a", [4]))
        num.append(count.num)
    return num[1] - num[0]


@pytest.mark.parametrize(
    ("family", "kv", "before", "after"),
    [
        ("llama", "own", 16, 9),
        ("llama", "scaled fp8", 20, 10),
        ("qwen3", "own", 24, 9),
        ("qwen3", "scaled fp8", 28, 10),
        ("gemma3_text", "own", 34, 9),
    ],
)
def test_a_layer_takes_few_launches(
    monkeypatch: pytest.MonkeyPatch,
    sequences: Callable[..., Any],
    family: str,
    kv: str,
    before: int,
    after: int,
) -> None:
    """D8, part: four products, attention, and four small operations; with scaled KV, its outputs' scale."""
    monkeypatch.setattr(torch._C, "_has_mkldnn", False)  # products as on CUDA
    ops = CudaOps(TritonKernels(interpreted()))
    found = [launches_of_a_layer(monkeypatch, sequences, family, kv, each) for each in (PLAIN, ops)]
    assert found == [before, after]


def test_a_step_with_them_can_be_recorded(
    sequences: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """I13, part: replays give what eager steps give."""
    model = random_model("qwen3", 3, head_dim=64, num_hidden_layers=1)
    ops, device = CudaOps(TritonKernels(interpreted())), RecordedGraphs()
    found = []
    for graphs in (GraphOptions(2, 1 << 30, device), None):
        forward = made(monkeypatch, model, ops, graphs=graphs)
        run = sequences(forward)
        run.step(run.row("a", [1, 2, 3]), run.row("b", [4]))
        found += [torch.stack(run.step(run.row("a", [5]), run.row("b", [6])))]
    assert device.replayed
    assert torch.equal(*found)
