"""The emulation of FlashInfer takes what the package takes; in graph mode it reads what is in its buffers."""

import ast
import inspect
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from support import flashinfer_emulator as emulator

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / ".venv" / "flashinfer"
OPTIONS: dict[str, Any] = {
    **{"num_qo_heads": 4, "num_kv_heads": 2, "page_size": 4},
    **{"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16},
}
KEPT = torch.randn(5, 4, 2, 2, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
KV = (KEPT[:, :, 0], KEPT[:, :, 1])


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def pages(*indices: int, **changes: Any) -> dict[str, Any]:
    """A plan of two decode rows over a page and two."""
    own = {"indptr": ints(0, 1, 3), "indices": ints(*indices), "last_page_len": ints(1, 4)}
    return {**own, "head_dim": 64, **OPTIONS, **changes}


def decoder(**options: Any) -> emulator.BatchDecodeWithPagedKVCacheWrapper:
    workspace = torch.zeros(1 << 20, dtype=torch.uint8)
    return emulator.BatchDecodeWithPagedKVCacheWrapper(
        workspace, use_tensor_cores=True, backend="fa2", **options
    )


def fixed(
    numbers: torch.Tensor, indices: torch.Tensor
) -> emulator.BatchDecodeWithPagedKVCacheWrapper:
    """A wrapper of two rows in graph mode, over buffers for three pages."""
    found = decoder(
        use_cuda_graph=True,
        paged_kv_indptr_buffer=ints(0, 0, 0),
        paged_kv_indices_buffer=indices,
        paged_kv_last_page_len_buffer=ints(0, 0),
    )
    found.reset_workspace_buffer(torch.zeros(1 << 20, dtype=torch.uint8), numbers)
    return found


def test_in_graph_mode_a_run_reads_the_tables_that_lie_in_the_buffers() -> None:
    """I13, part: not those that were planned. Refused is a plan that needs another launch (another window),
    and a run over numbers that another wrapper's plan has left in the workspace.
    """
    indices, numbers = ints(9, 9, 9), torch.zeros(64, dtype=torch.uint8)
    q = torch.randn(2, 4, 64, generator=torch.Generator().manual_seed(2)).bfloat16()
    wrapper, other = fixed(numbers, indices), decoder()
    wrapper.plan(**pages(2, 1, 3))
    indices.copy_(ints(4, 0, 1))
    other.plan(**pages(4, 0, 1))
    torch.testing.assert_close(wrapper.run(q, KV), other.run(q, KV), atol=1e-2, rtol=1e-2)
    narrow = pages(4, 0, 1, window_left=3)
    with pytest.raises(AssertionError, match="a graph would launch"):
        wrapper.plan(**narrow)
    fixed(numbers, ints(9, 9, 9)).plan(**narrow)
    with pytest.raises(AssertionError, match="another wrapper's plan"):
        wrapper.run(q, KV)


DECODE, PREFILL = "BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper"
EMULATED = (
    *(("decode.py", DECODE, name) for name in ("__init__", "workspace_size", "run")),
    ("decode.py", DECODE, "reset_workspace_buffer"),
    *(("prefill.py", PREFILL, name) for name in ("__init__", "plan", "run")),
    ("cascade.py", "merge_state_in_place", ""),
)


def package_source(module: str) -> ast.Module:
    """A module of FlashInfer: of the installed package, or of the wheel that `make flashinfer` fetched."""
    spec = find_spec("flashinfer")
    if spec is not None and spec.origin is not None:
        return ast.parse((Path(spec.origin).parent / module).read_text())
    wheels = sorted(FOLDER.glob("flashinfer_python-0.7.*.whl"))
    if not wheels:
        pytest.skip(f"no FlashInfer in {FOLDER}: `make flashinfer` fetches it where it can")
    with zipfile.ZipFile(wheels[-1]) as wheel:
        return ast.parse(wheel.read(f"flashinfer/{module}"))


def declared(nodes: list[ast.stmt], name: str) -> Any:
    """The last definition of `name`: those before it are overloads."""
    kinds = (ast.FunctionDef, ast.ClassDef)
    found = [node for node in nodes if isinstance(node, kinds) and node.name == name]
    assert found, f"the package has no {name}"
    return found[-1]


def parameters(function: ast.FunctionDef) -> dict[str, tuple[int, object]]:
    """Place and default of each parameter; a place of -1 is none."""
    args = function.args
    names = [arg.arg for arg in (*args.posonlyargs, *args.args)]
    missing = [None] * (len(names) - len(args.defaults))
    defaults: list[ast.expr | None] = [*missing, *args.defaults]
    found = {
        name: (i, _default(default))
        for i, (name, default) in enumerate(zip(names, defaults, strict=True))
    }
    keywords = zip(args.kwonlyargs, args.kw_defaults, strict=True)
    return found | {arg.arg: (-1, _default(default)) for arg, default in keywords}


def _default(node: ast.expr | None) -> object:
    return inspect.Parameter.empty if node is None else ast.literal_eval(node)


def check_signature(ours: Any, theirs: dict[str, tuple[int, object]], name: str) -> None:
    """A call that `ours` takes means the same to the package, and leaves out nothing that it needs."""
    own = inspect.signature(ours).parameters
    for place, each in enumerate(own.values()):
        assert each.name in theirs, f"{name} has no {each.name}"
        there, default = theirs[each.name]
        assert each.default == default, f"{each.name} of {name}"
        if each.kind is not inspect.Parameter.KEYWORD_ONLY:
            assert place == there, f"{each.name} of {name}"
    needed = {each for each, (_, default) in theirs.items() if default is inspect.Parameter.empty}
    assert needed <= own.keys(), f"{name} needs {needed - own.keys()}"


@pytest.mark.parametrize(("module", "name", "method"), EMULATED)
def test_signatures_are_the_package_s(module: str, name: str, method: str) -> None:
    """D8, part: names, places and defaults of all parameters that we give, read from the package's source."""
    theirs, ours = declared(package_source(module).body, name), getattr(emulator, name)
    if method:
        theirs, ours = declared(theirs.body, method), getattr(ours, method)
    check_signature(ours, parameters(theirs), f"{name}.{method}")


def test_a_decode_plan_takes_what_its_workspace_size_takes() -> None:
    """D8, part: the package's `plan` hands all but the first arguments on to `_plan_impl`."""
    body = declared(package_source("decode.py").body, DECODE).body
    theirs = parameters(declared(body, "_plan_impl"))
    check_signature(
        emulator.BatchDecodeWithPagedKVCacheWrapper.workspace_size, theirs, "_plan_impl"
    )
    plan = parameters(declared(body, "plan"))
    assert list(plan.items()) == list(theirs.items())[: len(plan)]
