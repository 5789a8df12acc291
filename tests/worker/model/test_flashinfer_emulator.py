"""The emulation of FlashInfer takes what the package takes, and is no more forgiving than it and CUDA."""

import ast
import inspect
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from mallee.worker.memory.budget import WORKSPACE
from mallee.worker.model.graphs import tables as graph_tables
from support import flashinfer_emulator as emulator
from support.late_device import LateDevice, placed

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
    workspace = torch.zeros(2 << 20, dtype=torch.uint8)
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
    found.reset_workspace_buffer(torch.zeros(2 << 20, dtype=torch.uint8), numbers)
    return found


def test_in_graph_mode_a_run_reads_the_tables_that_lie_in_the_buffers() -> None:
    """I13, part: not those that were planned. Refused is a plan that needs another launch (another window),
    and a run over numbers that another wrapper's plan has left in the workspace.
    """
    indices, numbers = ints(9, 9, 9), torch.zeros(1 << 12, dtype=torch.uint8)
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
    *(("prefill.py", PREFILL, name) for name in ("__init__", "workspace_size", "run")),
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


def test_a_prefill_plan_takes_what_its_workspace_size_takes() -> None:
    """D8, part: and so the emulation's, which hands its arguments on."""
    body = declared(package_source("prefill.py").body, PREFILL).body
    size, plan = (parameters(declared(body, name)) for name in ("workspace_size", "plan"))
    ours = inspect.signature(emulator.BatchPrefillWithPagedKVCacheWrapper.workspace_size).parameters
    for name in list(ours)[1:]:
        assert plan[name][1] == size[name][1], name
    assert list(plan)[:9] == list(size)[:9], "those that are given by place"


# Refusals: each is something that the package, or CUDA under it, would get wrong or would wait for.


def test_a_graph_pads_as_the_package_does() -> None:
    """Tiles of its rows, and one for each row but one: 319 for 256 rows of groups of four, not 256."""
    rows = 256
    tables = pages(
        *range(rows),
        indptr=torch.arange(rows + 1, dtype=torch.int32),
        last_page_len=torch.ones(rows, dtype=torch.int32),
        num_qo_heads=32,
        num_kv_heads=8,
        head_dim=128,
    )
    nbytes = 32 * (319 * 16 // 4) * 129 * 4

    def planned(room: int, numbers: int = 1 << 20) -> None:
        wrapper = decoder(
            use_cuda_graph=True,
            paged_kv_indptr_buffer=torch.zeros(rows + 1, dtype=torch.int32),
            paged_kv_indices_buffer=torch.zeros(rows, dtype=torch.int32),
            paged_kv_last_page_len_buffer=torch.zeros(rows, dtype=torch.int32),
        )
        own = (torch.zeros(size, dtype=torch.uint8) for size in (room, numbers))
        wrapper.reset_workspace_buffer(*own)
        wrapper.plan(**tables)

    planned(nbytes)
    with pytest.raises(
        RuntimeError, match=f"float workspace of {nbytes - 1} bytes, needs {nbytes}"
    ):
        planned(nbytes - 1)
    with pytest.raises(RuntimeError, match="int workspace of 6144 bytes, needs 6331"):
        planned(nbytes, 6144)


def test_a_row_is_shared_out_among_as_many_thread_blocks_as_a_gpu_has() -> None:
    """With eight, as few as a CPU's stand-in had, rows of 1024 pages would hardly be split."""
    for rows, parts in ((1, 32), (2, 32), (5, 26), (200, 1)):
        wrapper, num = decoder(), 1024
        nbytes, _ = wrapper.workspace_size(
            torch.arange(rows + 1, dtype=torch.int32) * num,
            torch.arange(rows * num, dtype=torch.int32),
            torch.full((rows,), 4, dtype=torch.int32),
            head_dim=64,
            **OPTIONS,
        )
        heads, tile, group = 4, 16, 2
        expected = 0 if parts == 1 else heads * (rows * parts * tile // group) * 65 * 4
        assert nbytes == expected, rows


def test_wrappers_beside_a_workspace_are_bounded_by_the_budget_of_a_worker() -> None:
    """Each takes 8 MiB of the device, and as much pinned memory; those that are gone give it back."""
    workspace = torch.zeros(WORKSPACE - 3 * emulator.NUMBERS_NBYTES, dtype=torch.uint8)

    def made() -> emulator.BatchPrefillWithPagedKVCacheWrapper:
        return emulator.BatchPrefillWithPagedKVCacheWrapper(workspace, backend="fa2")

    kept = [made() for _ in range(3)]
    with pytest.raises(torch.OutOfMemoryError, match="4 wrappers beside a workspace"):
        made()
    kept.pop()
    kept.append(made())


def test_a_plan_waits_until_the_last_one_was_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    device = LateDevice()
    device.install(monkeypatch)
    wrapper = decoder()
    wrapper.use_tensor_cores = False
    tables = pinned_pages(2, 1, 3)
    wrapper.plan(**tables)
    with pytest.raises(AssertionError, match="pinned memory is overwritten"):
        wrapper.plan(**tables)
    graph_tables.Mark(torch.device("cpu")).wait()
    wrapper.plan(**tables)


def test_tables_in_pageable_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """So is a decode wrapper over tensor cores, out of graph mode: the package's own qo_indptr lies there."""
    LateDevice().install(monkeypatch)
    wrapper = decoder()
    with pytest.raises(AssertionError, match="qo_indptr is copied from pageable memory"):
        wrapper.plan(**pinned_pages(2, 1, 3))
    for name in ("indptr", "indices", "last_page_len"):
        wrapper = decoder()
        wrapper.use_tensor_cores = False
        tables = pinned_pages(2, 1, 3)
        tables[name] = tables[name].clone()
        with pytest.raises(AssertionError, match=f"{name} is copied from pageable memory"):
            wrapper.plan(**tables)
    graphed = fixed(torch.zeros(1 << 12, dtype=torch.uint8), ints(9, 9, 9))
    with pytest.raises(AssertionError, match="indices of the host are copied by waiting"):
        graphed.plan(**pinned_pages(2, 1, 3))


def test_a_launch_comes_after_its_plan_s_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    device = LateDevice()
    device.install(monkeypatch)
    wrapper = decoder()
    wrapper.use_tensor_cores = False
    wrapper.plan(**pinned_pages(2, 1, 3))
    q = torch.zeros(2, 4, 64).bfloat16()
    with (
        device.on_stream(1, waits=False),
        pytest.raises(AssertionError, match="does not wait for the plan's copy"),
    ):
        wrapper.run(q, KV)
    with device.on_stream(2):
        wrapper.run(q, KV)
    graph_tables.Mark(torch.device("cpu")).wait()
    with device.on_stream(1, waits=False):
        wrapper.run(q, KV)


def pinned_pages(*indices: int) -> dict[str, Any]:
    """As `pages`, in pinned memory."""
    found = pages(*indices)
    for each in found.values():
        if isinstance(each, torch.Tensor):
            placed(each, "pinned")
    return found
