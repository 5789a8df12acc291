"""The emulation of FlashInfer: refuses what the package forbids, and has the package's signatures."""

import ast
import inspect
import zipfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from support import flashinfer_emulator as emulator

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / ".venv" / "flashinfer"
HEADS = {"num_qo_heads": 4, "num_kv_heads": 2, "page_size": 4}
HALF = {"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}
KEPT = torch.randn(5, 4, 2, 2, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
KV = (KEPT[:, :, 0], KEPT[:, :, 1])


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def prefill(**changes: Any) -> emulator.BatchPrefillWithPagedKVCacheWrapper:
    """Planned for rows of 2 and 3 tokens over 2 pages each, of which the last holds 1 and 4 keys."""
    wrapper = emulator.BatchPrefillWithPagedKVCacheWrapper(
        torch.zeros(1 << 20, dtype=torch.uint8), backend="fa2"
    )
    options: dict[str, Any] = {
        "qo_indptr": ints(0, 2, 5),
        "paged_kv_indptr": ints(0, 2, 4),
        "paged_kv_indices": ints(4, 0, 1, 3),
        "paged_kv_last_page_len": ints(1, 4),
        "head_dim_qk": 64,
        "causal": True,
        **HEADS,
        **HALF,
        **changes,
    }
    wrapper.plan(**options)
    return wrapper


def decode(
    workspace: int = 1 << 20, use_tensor_cores: bool = True, **changes: Any
) -> emulator.BatchDecodeWithPagedKVCacheWrapper:
    """Planned for two rows."""
    wrapper = emulator.BatchDecodeWithPagedKVCacheWrapper(
        torch.zeros(workspace, dtype=torch.uint8), use_tensor_cores=use_tensor_cores, backend="fa2"
    )
    options: dict[str, Any] = {
        "indptr": ints(0, 2, 4),
        "indices": ints(4, 0, 1, 3),
        "last_page_len": ints(1, 4),
        "head_dim": 64,
        **HEADS,
        **HALF,
        **changes,
    }
    wrapper.plan(**options)
    return wrapper


def queries(n: int = 5, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(n, 4, 64, generator=torch.Generator().manual_seed(2)).to(dtype)


def test_it_computes_attention_and_its_log_sum_exp_to_the_base_of_two() -> None:
    q = queries()
    out, lse = prefill(sm_scale=0.5).run(q, KV, q_scale=0.25, return_lse=True)
    keys, values = (x[[1, 3]].flatten(0, 1).float() for x in KV)  # of the second row
    for token, seen in ((2, 6), (3, 7), (4, 8)):
        for head in range(4):
            scores = keys[:seen, head // 2] @ q[token, head].float() / 8
            expected = scores.softmax(0) @ values[:seen, head // 2]
            torch.testing.assert_close(out[token, head].float(), expected, atol=1e-2, rtol=1e-2)
            total = float(scores.exp().sum().log2())
            assert float(lse[token, head]) == pytest.approx(total, abs=1e-4)


def test_merging_two_parts_gives_the_whole() -> None:
    q = queries(1)
    whole = decode(indptr=ints(0, 2), indices=ints(2, 3), last_page_len=ints(3))
    expected, lse = whole.run(q, KV, return_lse=True)
    parts = [
        decode(indptr=ints(0, 1), indices=ints(page), last_page_len=ints(n)).run(
            q, KV, return_lse=True
        )
        for page, n in ((2, 4), (3, 3))
    ]
    emulator.merge_state_in_place(*parts[0], *parts[1])
    torch.testing.assert_close(parts[0][0], expected, atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(parts[0][1], lse)


@pytest.mark.parametrize(
    ("plan", "error", "says"),
    [
        (lambda: prefill(qo_indptr=ints(0, 5, 2)), ValueError, "never fall"),
        (lambda: prefill(paged_kv_indptr=ints(0, 2, 3)), ValueError, "ends with 3"),
        (lambda: prefill(paged_kv_indptr=ints(0, 2)), ValueError, "shape"),
        (lambda: prefill(paged_kv_last_page_len=ints(0, 4)), ValueError, r"not in 1\.\.4"),
        (lambda: prefill(qo_indptr=ints(0, 6, 9)), ValueError, "6 causal queries over 5 keys"),
        (lambda: prefill(head_dim_qk=32), ValueError, "heads of 32"),
        (lambda: prefill(q_data_type=torch.float32), ValueError, "no kernels"),
        (lambda: prefill(logits_soft_cap=30.0), NotImplementedError, "logits_soft_cap"),
        (lambda: decode(indices=ints(4, 0, 1, 3).flip(0)[::2]), ValueError, "contiguous"),
        (lambda: decode(use_tensor_cores=False, fixed_split_size=2), ValueError, "tensor core"),
        (lambda: decode(fixed_split_size=1, workspace=4096), RuntimeError, "workspace of 4096"),
        (
            lambda: decode(use_tensor_cores=False, num_qo_heads=10),
            RuntimeError,
            "unsupported group 5",
        ),
    ],
)
def test_a_bad_plan_is_refused(
    plan: Callable[[], object], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        plan()


@pytest.mark.parametrize(
    ("run", "error", "says"),
    [
        (lambda: prefill().run(queries(4), KV), ValueError, r"q \(4, 4, 64\)"),
        (lambda: prefill().run(queries(), (KV[0].half(), KV[1].half())), ValueError, "float16"),
        (lambda: prefill().run(queries(), KV, out=queries(6)[1:, ::2]), ValueError, "out"),
        (lambda: prefill().run(queries(), KV, sinks=queries()), NotImplementedError, "sinks"),
        (lambda: decode().run(queries(3), KV), ValueError, "planned"),
        (
            lambda: emulator.BatchPrefillWithPagedKVCacheWrapper(
                torch.zeros(16, dtype=torch.uint8), backend="fa2"
            ).run(queries(), KV),
            RuntimeError,
            "run before plan",
        ),
    ],
)
def test_a_bad_run_is_refused(run: Callable[[], object], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        run()


class Fixed:
    """Wrappers of two rows in graph mode, over one set of buffers for three pages."""

    def __init__(self) -> None:
        self.buffers = (ints(0, 0, 0), ints(9, 9, 9), ints(0, 0))
        self.numbers = torch.zeros(64, dtype=torch.uint8)

    def wrapper(self, **changes: Any) -> emulator.BatchDecodeWithPagedKVCacheWrapper:
        names = (
            "paged_kv_indptr_buffer",
            "paged_kv_indices_buffer",
            "paged_kv_last_page_len_buffer",
        )
        options = {**dict(zip(names, self.buffers, strict=True)), **changes}
        workspace = torch.zeros(1 << 20, dtype=torch.uint8)
        found = emulator.BatchDecodeWithPagedKVCacheWrapper(
            workspace, "NHD", use_cuda_graph=True, use_tensor_cores=True, backend="fa2", **options
        )
        found.reset_workspace_buffer(workspace, self.numbers)
        return found


def fixed_plan(
    *indices: int, bounds: tuple[int, ...] = (0, 1, 3), **changes: Any
) -> dict[str, Any]:
    own = {"indptr": ints(*bounds), "indices": ints(*indices), "last_page_len": ints(1, 4)}
    return {**own, "head_dim": 64, **HEADS, **HALF, **changes}


def test_in_graph_mode_a_run_reads_the_tables_that_lie_in_the_buffers() -> None:
    """I13, part: another plan of as many rows changes the buffers and nothing else."""
    fixed = Fixed()
    wrapper, q = fixed.wrapper(), queries(2)
    for pages in ((4, 0, 1), (2, 1, 3)):
        wrapper.plan(**fixed_plan(*pages))
        assert [own.tolist() for own in fixed.buffers] == [[0, 1, 3], list(pages), [1, 4]]
        plain = decode(**fixed_plan(*pages)).run(q, KV)
        torch.testing.assert_close(wrapper.run(q, KV), plain, atol=1e-2, rtol=1e-2)
    fixed.buffers[1][:3] = ints(4, 0, 1)  # the buffers count, not what was planned
    other = decode(**fixed_plan(4, 0, 1)).run(q, KV)
    torch.testing.assert_close(wrapper.run(q, KV), other, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize(
    ("work", "error", "says"),
    [
        (lambda f: f.wrapper(paged_kv_indices_buffer=None), ValueError, "should be a torch.Tensor"),
        (lambda f: f.wrapper(paged_kv_indptr_buffer=ints(0, 0)), ValueError, r"batch_size \+ 1"),
        (
            lambda f: f.wrapper().plan(
                **fixed_plan(1, 2, bounds=(0, 1, 2)) | {"indptr": ints(0, 2)}
            ),
            ValueError,
            "shape",
        ),
        (
            lambda f: f.wrapper().plan(
                **fixed_plan(1) | {"indptr": ints(0, 1), "last_page_len": ints(1)}
            ),
            ValueError,
            "batch size should be fixed",
        ),
        (
            lambda f: f.wrapper().plan(**fixed_plan(1, 2, 3, 4, bounds=(0, 2, 4))),
            ValueError,
            "less than or equal to the allocated",
        ),
    ],
)
def test_a_bad_plan_in_graph_mode_is_refused(
    work: Callable[[Fixed], object], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        work(Fixed())


def test_a_launch_that_a_graph_could_not_make_again_is_refused() -> None:
    """I13, part: another window; and fixed splits, whose launches follow from the rows' lengths."""
    wrapper = Fixed().wrapper()
    wrapper.plan(**fixed_plan(4, 0, 1))
    with pytest.raises(AssertionError, match="a graph would launch"):
        wrapper.plan(**fixed_plan(4, 0, 1, window_left=3))
    wrapper = Fixed().wrapper()
    wrapper.plan(**fixed_plan(4, 0, bounds=(0, 1, 2), fixed_split_size=1))
    with pytest.raises(AssertionError, match="a graph would launch"):
        wrapper.plan(**fixed_plan(4, 0, 1, fixed_split_size=1))


def test_a_plan_lies_in_its_workspace_until_another_is_made_there() -> None:
    fixed = Fixed()
    first, second = fixed.wrapper(), fixed.wrapper()
    first.plan(**fixed_plan(4, 0, 1))
    second.plan(**fixed_plan(4, 0, 1, window_left=2))
    with pytest.raises(AssertionError, match="another wrapper's plan"):
        first.run(queries(2), KV)


EMULATED = {
    "decode.py": {
        "BatchDecodeWithPagedKVCacheWrapper": (
            *("__init__", "plan", "_plan_impl", "workspace_size", "run"),
            "reset_workspace_buffer",
        )
    },
    "prefill.py": {"BatchPrefillWithPagedKVCacheWrapper": ("__init__", "plan", "run")},
    "cascade.py": {"merge_state_in_place": ()},
}


def package_source(module: str) -> ast.Module:
    """A module of FlashInfer: of the installed package, or of the wheel that `make flashinfer` fetched."""
    spec = find_spec("flashinfer")
    if spec is not None and spec.origin is not None:
        return ast.parse((Path(spec.origin).parent / module).read_text())
    wheels = sorted(FOLDER.glob("flashinfer_python-*.whl"))
    if not wheels:
        pytest.skip(f"no FlashInfer in {FOLDER}: `make flashinfer` fetches it where it can")
    with zipfile.ZipFile(wheels[-1]) as wheel:
        return ast.parse(wheel.read(f"flashinfer/{module}"))


def declared(nodes: list[ast.stmt], name: str) -> Any:
    """The last definition of `name`: those before it are overloads."""
    found = [
        node
        for node in nodes
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name
    ]
    assert found, f"the package has no {name}"
    return found[-1]


def parameters(function: ast.FunctionDef) -> list[tuple[str, str, object]]:
    """Name, kind and default of each, as `inspect` would say them."""
    args = function.args
    positional = [*args.posonlyargs, *args.args]
    missing: list[ast.expr | None] = [None] * (len(positional) - len(args.defaults))
    found = [
        (arg.arg, "POSITIONAL_OR_KEYWORD", _default(default))
        for arg, default in zip(positional, [*missing, *args.defaults], strict=True)
    ]
    if args.vararg is not None:
        found.append((args.vararg.arg, "VAR_POSITIONAL", inspect.Parameter.empty))
    found += [
        (arg.arg, "KEYWORD_ONLY", _default(default))
        for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True)
    ]
    if args.kwarg is not None:
        found.append((args.kwarg.arg, "VAR_KEYWORD", inspect.Parameter.empty))
    return found


def _default(node: ast.expr | None) -> object:
    return inspect.Parameter.empty if node is None else ast.literal_eval(node)


def test_signatures_are_the_package_s() -> None:
    """D8, part: names, kinds and defaults of all parameters, read from the package's source."""
    for module, names in EMULATED.items():
        source = package_source(module).body
        for name, methods in names.items():
            theirs, ours = declared(source, name), getattr(emulator, name)
            pairs = [(declared(theirs.body, m), getattr(ours, m)) for m in methods]
            for node, function in pairs or [(theirs, ours)]:
                own = [
                    (each.name, each.kind.name, each.default)
                    for each in inspect.signature(function).parameters.values()
                ]
                assert own == parameters(node), f"{name}.{node.name} of {module}"


def test_the_package_is_of_the_version_that_we_ask_for() -> None:
    spec = find_spec("flashinfer")
    if spec is not None:
        pytest.skip("FlashInfer is installed: its version is checked where it is found")
    wheels = sorted(FOLDER.glob("flashinfer_python-*.whl"))
    if not wheels:
        pytest.skip(f"no FlashInfer in {FOLDER}: `make flashinfer` fetches it where it can")
    assert wheels[-1].name.startswith("flashinfer_python-0.7.")
