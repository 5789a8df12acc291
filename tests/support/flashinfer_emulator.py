"""FlashInfer 0.7 as far as `FlashInferAttention` uses it, by dense attention in torch: on any device.

It takes the package's arguments as far as we give them (`test_flashinfer_emulator.py` holds them against its
source) and no others; what the package documents is checked. Where the package's results depend on how a plan
shares out its keys, so do these, in their last bits: by the tile (FA2DetermineCtaTileQ of utils.cuh) and the
split (PrefillSplitQOKVIndptr and DecodePlan of scheduler.cuh), as on an H100 or H200. Plans take the room in
workspaces that the package's take. Log-sum-exps are to the base 2. Of graph mode that of decode wrappers is
emulated. With `DEVICE`, it refuses what a device that is late would get wrong.
"""

import itertools
import math
import weakref
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.utils._python_dispatch import _disable_current_modes

from mallee.worker.memory.budget import WORKSPACE

__version__ = "0.7.2"

NUM_THREAD_BLOCKS = 2 * 132
"""Of the device at a time, for plans that split as they like: two on each multiprocessor."""
NUM_DECODE_BLOCKS = 8 * 132
"""The same without tensor cores, where the package asks the driver: a guess."""
NUMBERS_NBYTES = 8 << 20
"""Of each wrapper on the device, for the numbers of a plan, and as much pinned memory of the host."""
DEVICE: Any = None
"""A `LateDevice`; None: all is done at once."""
_KV_TILES = {16: 48, 64: 32, 128: 80, 192: 96}
"""Keys that are added up at a time, by tile: the true ones depend on the device's memory."""
_HALVES = (torch.float16, torch.bfloat16)
_EIGHTHS = (torch.float8_e4m3fn, torch.float8_e5m2)
_LN2 = math.log(2)
_TYPES = {
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e5m2: "e5m2",
}
PREBUILT: frozenset[str] | None = None
"""Modules of kernels that were built ahead, where nothing builds others; None: a compiler is there."""
ASKED: set[str] = set()
"""Modules that were loaded so far."""
_WRAPPERS: "weakref.WeakSet[_Wrapper]" = weakref.WeakSet()
_PLANS: dict[int, "_Plan"] = {}
"""The plans of graph mode, by the address of the integer workspace that they were written to last."""

Pages: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""indptr, indices and last_page_len."""


class MissingJITCacheError(RuntimeError):
    """As the package's."""


def _load(name: str) -> None:
    """A module by its name. In the package it is built here, or found, when a plan first asks for it."""
    if PREBUILT is not None and name not in PREBUILT:
        raise MissingJITCacheError(f"JIT compilation is disabled, {name} is not in the JIT cache")
    ASKED.add(name)


class _Plan(NamedTuple):
    """A batch as `plan` leaves it to `run`."""

    qo_indptr: list[int]
    tables: list[list[int]]
    kv_lens: list[int]
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    causal: bool
    window_left: int
    sm_scale: float
    q_dtype: torch.dtype
    kv_dtype: torch.dtype
    tile: int
    split: int | None  # keys; None: unsplit
    padded: int  # thread blocks that are launched for each key head

    @property
    def frozen(self) -> tuple[Any, ...]:
        """The parts that a recorded launch has from the plan that it was recorded with."""
        return (len(self.tables), *self[3:13], self.split is not None, self.padded)


class _Needs(NamedTuple):
    """A plan, and the bytes of both workspaces that it takes."""

    plan: _Plan
    floats: int
    numbers: int


class _Wrapper:
    """The common part of both wrappers.

    In graph mode a plan's tables lie in the buffers that were given, its numbers in the integer workspace,
    where a launch finds those that were planned last, whoever planned them. A plan that would need another
    launch than the first one of its wrapper did is refused here (the package doesn't notice).
    """

    use_tensor_cores = True

    def _open(self, workspace: torch.Tensor, layout: str, backend: str) -> None:
        assert workspace.dtype == torch.uint8
        assert workspace.dim() == 1
        assert workspace.data_ptr() % 16 == 0
        assert (layout, backend) in (("NHD", "fa2"), ("NHD", "fa3")), "not emulated"
        self._backend = backend
        self._workspace = workspace
        self.device = workspace.device
        self._planned: _Plan | None = None
        self._buffers: Pages | None = None
        self._numbers = torch.empty(NUMBERS_NBYTES, dtype=torch.uint8, device=self.device)
        self._copied: Any = None  # of the last plan, where there is a `DEVICE`
        _WRAPPERS.add(self)
        beside = [own._numbers for own in _WRAPPERS if own._workspace is workspace]
        numbers = {own.data_ptr(): own.numel() for own in beside}  # those of graphs are shared
        if (taken := workspace.numel() + sum(numbers.values())) > WORKSPACE:
            raise torch.OutOfMemoryError(
                f"{len(beside)} wrappers beside a workspace take {taken} bytes, the budget is {WORKSPACE}"
            )

    def _fix(self, *buffers: torch.Tensor | None) -> None:
        """Graph mode: indptr, indices and last_page_len go to these."""
        ints = [own for own in buffers if own is not None and own.dtype == torch.int32]
        if len(ints) != 3 or any(not x.is_contiguous() or x.device != self.device for x in ints):
            raise ValueError("in graph mode tables lie in given tensors of int32")
        indptr, indices, last = ints
        if len(indptr) != len(last) + 1:
            raise ValueError("The size of paged_kv_indptr_buffer should be batch_size + 1")
        self._buffers = (indptr, indices, last)

    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor
    ) -> None:
        for own in (float_workspace_buffer, int_workspace_buffer):
            assert own.data_ptr() % 16 == 0
        self._workspace, self._numbers = float_workspace_buffer, int_workspace_buffer

    def _make_plan(
        self,
        qo_indptr: torch.Tensor | None,
        pages: Pages,
        *,
        heads: tuple[int, int],
        head_dim: int,
        page_size: int,
        causal: bool = False,
        window_left: int,
        sm_scale: float | None,
        dtypes: tuple[torch.dtype | str, torch.dtype | str | None],
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
    ) -> _Needs:
        indptr, indices, last_page_len = pages
        num_qo_heads, num_kv_heads = heads
        rows = len(last_page_len)
        if qo_indptr is None:
            qo_indptr = torch.arange(rows + 1, dtype=torch.int32)
        for name, own, size in (
            ("qo_indptr", qo_indptr, rows + 1),
            ("indptr", indptr, rows + 1),
            ("indices", indices, None),
            ("last_page_len", last_page_len, rows),
        ):
            if own.dtype != torch.int32:
                raise TypeError(f"{name} is {own.dtype}, not int32")
            if own.dim() != 1 or not own.is_contiguous() or size not in (None, len(own)):
                raise ValueError(f"{name}: shape {tuple(own.shape)}, want [{size}], contiguous")
        for name, own in (("qo_indptr", qo_indptr), ("indptr", indptr)):
            if int(own[0]) or bool((own.diff() < 0).any()):
                raise ValueError(f"{name} must begin with 0 and never fall: {own.tolist()}")
        if int(indptr[-1]) != len(indices):
            raise ValueError(f"indptr ends with {int(indptr[-1])}, indices has {len(indices)}")
        if not rows or bool((indptr.diff() == 0).any()):
            raise ValueError("a row without pages: its output would be undefined here")
        if bool(((last_page_len < 1) | (last_page_len > page_size)).any()):
            raise ValueError(f"last_page_len not in 1..{page_size}: {last_page_len.tolist()}")
        if num_qo_heads % num_kv_heads or head_dim not in (64, 128, 256):
            raise ValueError(f"{num_qo_heads} / {num_kv_heads} heads of {head_dim}")
        if window_left < -1:
            raise ValueError(f"window_left={window_left}")
        q_dtype, kv_dtype = dtypes
        if q_dtype not in _HALVES or kv_dtype not in (q_dtype, *_EIGHTHS):
            raise ValueError(f"no kernels for queries {q_dtype}, KV {kv_dtype}")
        assert isinstance(q_dtype, torch.dtype)
        assert isinstance(kv_dtype, torch.dtype)
        name = "prefill" if self.use_tensor_cores else "decode"
        tail = "_f16qk_False_kv_stride_equal" if self.use_tensor_cores else ""
        if self._backend == "fa3":
            if kv_dtype != q_dtype:
                raise RuntimeError(f"fa3 has no kernels for queries {q_dtype}, KV {kv_dtype}")
            tail = "_f16qk_False_sm90"
        _load(
            f"batch_{name}_with_kv_cache_dtype_q_{_TYPES[q_dtype]}_dtype_kv_{_TYPES[kv_dtype]}"
            f"_dtype_o_{_TYPES[q_dtype]}_dtype_idx_i32_head_dim_qk_{head_dim}_head_dim_vo_{head_dim}"
            f"_posenc_0_use_swa_{window_left != -1}_use_logits_cap_False{tail}"
        )
        tables = [part.tolist() for part in indices.split(indptr.diff().tolist())]
        lens = ((indptr.diff() - 1) * page_size + last_page_len).tolist()
        sizes = qo_indptr.diff().tolist()
        for size, length in zip(sizes, lens, strict=True):
            if causal and size > length:
                raise ValueError(f"{size} causal queries over {length} keys")
        group, counts, is_graph = num_qo_heads // num_kv_heads, [*map(len, tables)], self.is_graph
        tile, least = 16, max(128 // page_size, 1)
        if self._backend == "fa3":  # tiles of one head's queries, unsplit
            assert fixed_split_size is None
            disable_split_kv, tile = True, 192 if head_dim == 64 else 128
            num_tiles = [group * -(-size // tile) for size in sizes]
            limit, most_tiles = NUM_THREAD_BLOCKS // num_kv_heads, sum(num_tiles)
        elif self.use_tensor_cores:
            packed = (sum(sizes) - rows + 1) * group if is_graph else sum(sizes) * group // rows
            tile = _tile(packed, head_dim)
            limit = NUM_THREAD_BLOCKS // num_kv_heads
            num_tiles = [-(-size * group // tile) for size in sizes]
            most_tiles = -(-sum(sizes) * group // tile) + rows - 1
            if window_left >= 0:
                counts = [min(-(-(window_left + tile) // page_size), num) for num in counts]
        else:
            limit, num_tiles, most_tiles = NUM_DECODE_BLOCKS // num_kv_heads, [1] * rows, rows
        if disable_split_kv or (not self.use_tensor_cores and rows >= limit):
            split = None
        elif fixed_split_size is not None:
            assert fixed_split_size >= 1
            assert not is_graph, "not emulated: launches that follow from lengths"
            split = fixed_split_size
        else:
            split = _split(num_tiles, counts, least=least, limit=limit)
        num_blocks = sum(
            tiles * (1 if split is None else -(-num // split))
            for tiles, num in zip(num_tiles, counts, strict=True)
        )
        if not is_graph and num_blocks == sum(num_tiles):
            split = None
        padded = num_blocks
        if is_graph:
            padded = most_tiles if split is None else max(limit, most_tiles)
            if num_blocks > padded:
                raise RuntimeError("new batch size should not exceed padded batch size")
        partial_rows = -(-padded * tile // group) if self.use_tensor_cores else padded
        floats = 0 if split is None else num_qo_heads * partial_rows * (head_dim + 1) * 4
        plan = _Plan(
            qo_indptr.tolist(),
            tables,
            lens,
            num_qo_heads,
            num_kv_heads,
            head_dim,
            page_size,
            causal,
            window_left,
            1 / math.sqrt(head_dim) if sm_scale is None else sm_scale,
            q_dtype,
            kv_dtype,
            tile,
            None if split is None else split * page_size,
            padded,
        )
        # request, tile and chunk of each thread block, its mask, and where each row's parts begin and end
        return _Needs(plan, floats, 13 * padded + 4 * (rows + sum(sizes) + 2) + 8 * 16)

    @property
    def is_graph(self) -> bool:
        return self._buffers is not None

    def _hold(self, needs: _Needs, tables: Pages, qo_indptr: torch.Tensor | None) -> None:
        planned = needs.plan
        for name, nbytes, own in (
            ("float", needs.floats, self._workspace),
            ("int", needs.numbers, self._numbers),
        ):
            if nbytes > own.numel():
                raise RuntimeError(f"{name} workspace of {own.numel()} bytes, needs {nbytes}")
        if DEVICE is not None:
            self._enqueue(tables, qo_indptr)
        if self._buffers is not None:
            _check_fixed(self._buffers, tables)
            for buffer, own in zip(self._buffers, tables, strict=True):
                buffer[: len(own)].copy_(own)
            if self._planned is not None and self._planned.frozen != planned.frozen:
                raise AssertionError(
                    f"a graph would launch {self._planned.frozen}, planned is {planned.frozen}"
                )
            _PLANS[self._numbers.data_ptr()] = planned
        self._planned = planned

    def _enqueue(self, tables: Pages, qo_indptr: torch.Tensor | None) -> None:
        """Copy tables and numbers to `DEVICE`, where they come in their time."""
        if self._copied is not None and not DEVICE.is_done(self._copied):
            raise AssertionError(
                "the wrapper's pinned memory is overwritten before its last plan was copied"
            )
        names = ("indptr", "indices", "last_page_len", "qo_indptr")
        given = (*tables, qo_indptr)
        if self.use_tensor_cores and self.is_graph:  # it has those since it was made
            given = tables
        for name, tensor in zip(names, given, strict=False):
            if tensor is None and not self.use_tensor_cores:
                continue
            place = getattr(tensor, "place", None)  # the package's own are in pageable memory
            if place is None:
                raise AssertionError(
                    f"{name} is copied from pageable memory: the driver may wait for the device"
                )
            if self.is_graph and name == "indices" and place != "device":
                raise AssertionError("in graph mode indices of the host are copied by waiting")
        self._copied = DEVICE.enqueue()

    def _plan_now(self) -> _Plan | None:
        """The plan that a launch would find."""
        if self._buffers is None or self._planned is None:
            return self._planned
        plan = _PLANS[self._numbers.data_ptr()]
        assert plan.frozen == self._planned.frozen, (
            "another wrapper's plan lies in this one's workspace"
        )
        indptr, indices, last = (own.cpu() for own in self._buffers)
        tables = [indices[b:e].tolist() for b, e in itertools.pairwise(indptr.tolist())]
        lens = [
            (len(t) - 1) * plan.page_size + n for t, n in zip(tables, last.tolist(), strict=True)
        ]
        return plan._replace(tables=tables, kv_lens=lens)

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: tuple[torch.Tensor, torch.Tensor],
        *,
        q_scale: float | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
    ) -> Any:
        with _disable_current_modes():
            plan = self._plan_now()
        if plan is None:
            raise RuntimeError("run before plan")
        if DEVICE is not None and not DEVICE.is_before(self._copied):
            raise AssertionError("launched on a stream that does not wait for the plan's copy")
        k, v = paged_kv_cache
        kept = (plan.page_size, plan.num_kv_heads, plan.head_dim)
        for own in (k, v):
            if own.dim() != 4 or own.shape[1:] != kept:
                raise ValueError(f"KV {tuple(own.shape)}, want [pages, {kept}]")
            if own.dtype != plan.kv_dtype or own.device != self.device or own.stride(3) != 1:
                raise ValueError(f"KV {own.dtype} on {own.device}, strides {own.stride()}")
            if own.data_ptr() % 16 or any(s * own.itemsize % 16 for s in own.stride()[:3]):
                raise ValueError("KV isn't aligned to 16 bytes")
        assert k.stride() == v.stride()
        shape = (plan.qo_indptr[-1], plan.num_qo_heads, plan.head_dim)
        if q.shape != shape or q.dtype != plan.q_dtype or q.device != self.device:
            raise ValueError(f"q {tuple(q.shape)} {q.dtype} on {q.device}, planned {shape}")
        if q.stride(2) != 1:
            raise ValueError(f"q has strides {q.stride()}")
        if out is None:
            out = torch.empty(shape, dtype=plan.q_dtype, device=self.device)
        if out.shape != shape or out.dtype != plan.q_dtype or not out.is_contiguous():
            raise ValueError(f"out {tuple(out.shape)} {out.dtype}, planned {shape}")
        if lse is None:
            lse = torch.empty(shape[:2], dtype=torch.float32, device=self.device)
        if lse.shape != shape[:2] or lse.dtype != torch.float32 or not lse.is_contiguous():
            raise ValueError(f"lse {tuple(lse.shape)} {lse.dtype}")
        scale = plan.sm_scale * (1.0 if q_scale is None else q_scale)
        with _disable_current_modes():  # one launch, and no operation of torch
            for i, (table, length) in enumerate(zip(plan.tables, plan.kv_lens, strict=True)):
                span = slice(plan.qo_indptr[i], plan.qo_indptr[i + 1])
                pages = torch.tensor(table, device=self.device)
                keys, values = (_gather(own, pages)[:length] for own in (k, v))
                out[span], lse[span] = _attend(plan, q[span].float() * scale, keys, values)
        return (out, lse) if return_lse else out


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        *,
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        assert backend == "fa2", "not emulated"
        self._open(float_workspace_buffer, kv_layout, backend)
        self.use_tensor_cores = use_tensor_cores
        if use_cuda_graph:
            self._fix(
                paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer
            )

    def workspace_size(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        window_left: int = -1,
        sm_scale: float | None = None,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
        fixed_split_size: int | None = None,
    ) -> tuple[int, int]:
        if not self.use_tensor_cores:
            if fixed_split_size is not None:
                raise ValueError("fixed_split_size is only supported by tensor core decode")
            if num_qo_heads // num_kv_heads not in (1, 2, 3, 4, 6, 8, 16):
                raise RuntimeError(f"unsupported group {num_qo_heads // num_kv_heads}")
        self._made = self._make_plan(
            None,
            (indptr, indices, last_page_len),
            heads=(num_qo_heads, num_kv_heads),
            head_dim=head_dim,
            page_size=page_size,
            window_left=window_left,
            sm_scale=sm_scale,
            dtypes=(q_data_type, kv_data_type),
            fixed_split_size=fixed_split_size,
        )
        return self._made.floats, self._made.numbers

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        **options: Any,
    ) -> None:
        """With the arguments of `workspace_size`, which are the package's here, too."""
        pages = (indptr, indices, last_page_len)
        self.workspace_size(*pages, **options)
        self._hold(self._made, pages, None)


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        *,
        backend: str = "auto",
    ) -> None:
        self._open(float_workspace_buffer, kv_layout, backend)

    def workspace_size(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
    ) -> tuple[int, int]:
        pages = (paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        self._made = self._make_plan(
            qo_indptr,
            pages,
            heads=(num_qo_heads, num_kv_heads),
            head_dim=head_dim_qk,
            page_size=page_size,
            causal=causal,
            window_left=window_left,
            sm_scale=sm_scale,
            dtypes=(q_data_type, kv_data_type),
            fixed_split_size=fixed_split_size,
            disable_split_kv=disable_split_kv,
        )
        return self._made.floats, self._made.numbers

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        **options: Any,
    ) -> None:
        """With the arguments of `workspace_size`, which are the package's here, too."""
        pages = (paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        self.workspace_size(qo_indptr, *pages, **options)
        self._hold(self._made, pages, qo_indptr)


def merge_state_in_place(
    v: torch.Tensor,
    s: torch.Tensor,
    v_other: torch.Tensor,
    s_other: torch.Tensor,
) -> None:
    _load("cascade")
    assert v.shape == v_other.shape
    assert s.shape == s_other.shape == v.shape[:2]
    assert v.dtype == v_other.dtype
    assert v.dtype in _HALVES
    assert s.dtype == s_other.dtype == torch.float32
    for own in (v, s, v_other, s_other):
        assert own.is_contiguous()
        assert own.device == v.device
    share = torch.sigmoid((s_other - s) * _LN2).unsqueeze(-1)
    v.copy_(torch.lerp(v.float(), v_other.float(), share))
    s.copy_(torch.logaddexp2(s, s_other))


def _check_fixed(buffers: Pages, tables: Pages) -> None:
    (_, indices, last), (_, own_indices, own_last) = buffers, tables
    if len(own_last) != len(last):
        raise ValueError(
            f"The batch size should be fixed in cudagraph mode, the runtime batch size {len(own_last)} "
            f" mismatches the batch size set during initialization {len(last)}"
        )
    if len(own_indices) > len(indices):
        raise ValueError("The size of indices should be less than or equal to the allocated buffer")


def _tile(mean_packed: int, head_dim: int) -> int:
    if mean_packed > 64 and head_dim < 256:
        return 128
    return 64 if mean_packed > 16 else 16


def _split(num_tiles: list[int], pages: list[int], *, least: int, limit: int) -> int:
    """Pages that one thread block meets: as few as the thread blocks allow, and no fewer than `least`."""
    low, high = least, max(pages)
    while low < high:
        middle = (low + high) // 2
        num = sum(t * -(-max(p, 1) // middle) for t, p in zip(num_tiles, pages, strict=True))
        low, high = (middle + 1, high) if num > limit else (low, middle)
    return low


def _gather(cache: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
    """The keys or values of `pages`, in order, as float32."""
    narrow = cache.view(torch.uint8) if cache.itemsize == 1 else cache
    return narrow[pages].flatten(0, 1).view(cache.dtype).float()


def _attend(
    plan: _Plan, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and log-sum-exps of one row; keys are met a tile at a time, chunks merged at the end."""
    n, length = len(q), len(keys)
    at = torch.arange(length - n, length, device=q.device)[:, None]
    slots = torch.arange(length, device=q.device)[None, :]
    hidden = slots > at if plan.causal else torch.zeros_like(slots > at)
    if plan.window_left >= 0:
        hidden = hidden | (slots + plan.window_left < at)
    group = plan.num_qo_heads // plan.num_kv_heads
    keys, values = (x.repeat_interleave(group, 1) for x in (keys, values))
    scores = torch.einsum("qhd,khd->qhk", q, keys).masked_fill(hidden[:, None], -torch.inf)
    highest = scores.amax(-1, keepdim=True)
    weights = (scores - highest).exp()
    total, out = torch.zeros_like(highest), torch.zeros_like(q)
    for begin in range(0, length, plan.split or length):
        chunk = slice(begin, begin + (plan.split or length))
        own_total, own = torch.zeros_like(total), torch.zeros_like(out)
        for w, v in zip(
            weights[..., chunk].split(_KV_TILES[plan.tile], -1),
            values[chunk].split(_KV_TILES[plan.tile]),
            strict=True,
        ):
            own_total += w.sum(-1, keepdim=True)
            own += torch.einsum("qhk,khd->qhd", w, v)
        total, out = total + own_total, out + own
    lse = (highest + total.log()).squeeze(-1) / _LN2
    return (out / total).to(plan.q_dtype), lse
