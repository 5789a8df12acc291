"""FlashInfer 0.7 as far as `FlashInferAttention` uses it, by dense attention in torch: on any device.

Signatures are the package's (`test_flashinfer_emulator.py` holds them against it); what it documents is
checked, and what isn't emulated is refused. Where the package's results depend on how a plan shares out its
keys, so do these, in their last bits: by the tile (FA2DetermineCtaTileQ of utils.cuh) and by the split
(PrefillSplitQOKVIndptr of scheduler.cuh). Log-sum-exps are to the base 2. Of graph mode that of decode
wrappers is emulated.
"""

import itertools
import math
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes

__version__ = "0.7.2"

NUM_THREAD_BLOCKS = 8
"""Of the device, for plans that split as they like."""
_KV_TILES = {16: 48, 64: 32, 128: 80}
"""Keys that are added up at a time, by tile: the true ones depend on the device's memory."""
_HALVES = (torch.float16, torch.bfloat16)
_EIGHTHS = (torch.float8_e4m3fn, torch.float8_e5m2)
_LN2 = math.log(2)
_PLANS: dict[int, "_Plan"] = {}
"""The plans of graph mode, by the address of the integer workspace that they were written to last."""


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
    o_dtype: torch.dtype
    tile: int
    split: int | None  # keys; None: unsplit

    @property
    def frozen(self) -> tuple[Any, ...]:
        """The parts that a recorded launch has from the plan that it was recorded with."""
        return (len(self.tables), *self[3:14], self.split is not None)


class _Wrapper:
    """The common part of both wrappers.

    In graph mode a plan's tables lie in the buffers that were given, its numbers in the integer workspace,
    where a launch finds those that were planned last, whoever planned them. A plan that would need another
    launch than the first one of its wrapper did is refused here (the package doesn't notice).
    """

    use_tensor_cores = True

    def _open(self, workspace: torch.Tensor, layout: str, backend: str, **others: object) -> None:
        assert workspace.dtype == torch.uint8
        assert workspace.dim() == 1
        assert workspace.data_ptr() % 16 == 0
        _refuse(kv_layout=layout != "NHD", backend=backend != "fa2", **others)
        self._workspace = workspace
        self.device = workspace.device
        self._planned: _Plan | None = None
        self._buffers: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        self._numbers = torch.empty(16, dtype=torch.uint8, device=self.device)

    def _fix(self, *buffers: torch.Tensor | None) -> None:
        """Graph mode: indptr, indices and last_page_len go to these."""
        for name, own in zip(("indptr", "indices", "last_page_len"), buffers, strict=True):
            if own is None:
                raise ValueError(
                    f"paged_kv_{name}_buffer should be a torch.Tensor in cudagraph mode"
                )
            assert own.dtype == torch.int32
            assert own.is_contiguous()
            assert own.device == self.device
        indptr, indices, last = buffers
        assert indptr is not None
        assert indices is not None
        assert last is not None
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
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        *,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        causal: bool,
        window_left: int,
        sm_scale: float | None,
        dtypes: tuple[Any, Any, Any],
        fixed_split_size: int | None,
        disable_split_kv: bool,
    ) -> tuple[_Plan, int]:
        """The plan, and the bytes of workspace that it needs."""
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
        q_dtype, kv_dtype, o_dtype = dtypes
        kv_dtype, o_dtype = kv_dtype or q_dtype, o_dtype or q_dtype
        if q_dtype not in _HALVES or o_dtype != q_dtype or kv_dtype not in (q_dtype, *_EIGHTHS):
            raise ValueError(f"no kernels for queries {q_dtype}, KV {kv_dtype}, output {o_dtype}")
        tables = [part.tolist() for part in indices.split(indptr.diff().tolist())]
        lens = ((indptr.diff() - 1) * page_size + last_page_len).tolist()
        sizes = qo_indptr.diff().tolist()
        for size, length in zip(sizes, lens, strict=True):
            if causal and size > length:
                raise ValueError(f"{size} causal queries over {length} keys")
        group = num_qo_heads // num_kv_heads
        tile = _tile(sum(sizes) * group // rows, head_dim)
        num_tiles = [-(-size * group // tile) for size in sizes]
        pages = [len(table) for table in tables]
        split = _split(num_tiles, pages, page_size, fixed_split_size, disable_split_kv)
        padded = max(NUM_THREAD_BLOCKS // num_kv_heads, sum(num_tiles))
        if self._buffers is not None and fixed_split_size is not None:
            chunks = sum(
                t * -(-p // fixed_split_size) for t, p in zip(num_tiles, pages, strict=True)
            )
            if chunks > padded:
                raise RuntimeError(
                    "new batch size should not exceed padded batch size. If you are using fixed split size,"
                    " please consider disabling cuda graph."
                )
            split = split if max(pages) > fixed_split_size else None
        nbytes = 0
        if self._buffers is not None and split is not None:
            nbytes = num_qo_heads * -(-padded * tile // group) * (head_dim + 1) * 4
        elif split is not None and max(pages) > split:
            chunks = sum(t * -(-p // split) for t, p in zip(num_tiles, pages, strict=True))
            nbytes = num_qo_heads * -(-chunks * tile // group) * (head_dim + 1) * 4
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
            o_dtype,
            tile,
            None if split is None else split * page_size,
        )
        return plan, nbytes

    def _hold(self, plan: tuple[_Plan, int], tables: tuple[torch.Tensor, ...] = ()) -> None:
        planned, nbytes = plan
        if nbytes > self._workspace.numel():
            raise RuntimeError(f"workspace of {self._workspace.numel()} bytes, needs {nbytes}")
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

    def _run(
        self,
        q: torch.Tensor,
        paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        *,
        scales: tuple[float | None, float | None, float | None],
        out: torch.Tensor | None,
        lse: torch.Tensor | None,
        return_lse: bool,
        window_left: int | None,
    ) -> Any:
        with _disable_current_modes():
            plan = self._plan_now()
        if plan is None:
            raise RuntimeError("run before plan")
        if torch.is_tensor(paged_kv_cache):
            if paged_kv_cache.dim() != 5 or paged_kv_cache.shape[1] != 2:
                raise ValueError(f"KV {tuple(paged_kv_cache.shape)}, want [pages, 2, ...]")
            paged_kv_cache = paged_kv_cache.unbind(1)
        assert isinstance(paged_kv_cache, tuple)
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
        assert window_left in (None, plan.window_left)
        shape = (plan.qo_indptr[-1], plan.num_qo_heads, plan.head_dim)
        if q.shape != shape or q.dtype != plan.q_dtype or q.device != self.device:
            raise ValueError(f"q {tuple(q.shape)} {q.dtype} on {q.device}, planned {shape}")
        if q.stride(2) != 1:
            raise ValueError(f"q has strides {q.stride()}")
        if out is None:
            out = torch.empty(shape, dtype=plan.o_dtype, device=self.device)
        if out.shape != shape or out.dtype != plan.o_dtype or not out.is_contiguous():
            raise ValueError(f"out {tuple(out.shape)} {out.dtype}, planned {shape}")
        if lse is None:
            lse = torch.empty(shape[:2], dtype=torch.float32, device=self.device)
        if lse.shape != shape[:2] or lse.dtype != torch.float32 or not lse.is_contiguous():
            raise ValueError(f"lse {tuple(lse.shape)} {lse.dtype}")
        scale = plan.sm_scale * math.prod(s for s in scales[:2] if s is not None)
        with _disable_current_modes():  # one launch, and no operation of torch
            for i, (table, length) in enumerate(zip(plan.tables, plan.kv_lens, strict=True)):
                span = slice(plan.qo_indptr[i], plan.qo_indptr[i + 1])
                pages = torch.tensor(table, device=self.device)
                keys, values = (_gather(own, pages)[:length] for own in (k, v))
                out[span], lse[span] = _attend(plan, q[span].float() * scale, keys, values)
            if scales[2] is not None:
                out *= scales[2]
        return (out, lse) if return_lse else out


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
    ) -> None:
        self._open(
            float_workspace_buffer,
            kv_layout,
            backend,
            jit_args=jit_args,
        )
        self.use_tensor_cores = use_tensor_cores
        buffers = (
            paged_kv_indptr_buffer,
            paged_kv_indices_buffer,
            paged_kv_last_page_len_buffer,
        )
        if use_cuda_graph:
            self._fix(*buffers)

    def workspace_size(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: str | torch.dtype | None = "float16",
        kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype | None = None,
        data_type: str | torch.dtype | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        block_tables: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        q_len_per_req: int = 1,
    ) -> tuple[int, int]:
        _refuse(
            pos_encoding_mode=pos_encoding_mode != "NONE",
            logits_soft_cap=logits_soft_cap,
            data_type=data_type,
            rope_scale=rope_scale,
            rope_theta=rope_theta,
            block_tables=block_tables,
            seq_lens=seq_lens,
            q_len_per_req=q_len_per_req != 1,
        )
        if self._buffers is not None:
            _check_fixed(self._buffers, (indptr, indices, last_page_len))
        _, nbytes = self._make_plan(
            None,
            indptr,
            indices,
            last_page_len,
            num_qo_heads=num_qo_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            page_size=page_size,
            causal=False,
            window_left=window_left,
            sm_scale=sm_scale,
            dtypes=(q_data_type, kv_data_type, o_data_type),
            fixed_split_size=fixed_split_size,
            disable_split_kv=disable_split_kv,
        )
        return nbytes, 0

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *deprecated_positional_args: Any,
        **kwargs: Any,
    ) -> None:
        _refuse(deprecated_positional_args=deprecated_positional_args)
        heads = (num_qo_heads, num_kv_heads, head_dim)
        self._plan_impl(indptr, indices, last_page_len, *heads, page_size, **kwargs)

    def _plan_impl(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        window_right: int = 0,
        logits_soft_cap: float | None = None,
        q_data_type: str | torch.dtype | None = "float16",
        kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype | None = None,
        data_type: str | torch.dtype | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        block_tables: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        q_len_per_req: int = 1,
        is_causal: bool | None = None,
    ) -> None:
        _refuse(
            pos_encoding_mode=pos_encoding_mode != "NONE",
            window_right=window_right,
            logits_soft_cap=logits_soft_cap,
            data_type=data_type,
            rope_scale=rope_scale,
            rope_theta=rope_theta,
            block_tables=block_tables,
            seq_lens=seq_lens,
            q_len_per_req=q_len_per_req != 1,
            is_causal=is_causal,
        )
        if not self.use_tensor_cores:
            if fixed_split_size is not None:
                raise ValueError("fixed_split_size is only supported by tensor core decode")
            if num_qo_heads // num_kv_heads not in (1, 2, 3, 4, 6, 8, 16):
                raise RuntimeError(f"unsupported group {num_qo_heads // num_kv_heads}")
        self._hold(
            self._make_plan(
                None,
                indptr,
                indices,
                last_page_len,
                num_qo_heads=num_qo_heads,
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                page_size=page_size,
                causal=False,
                window_left=window_left,
                sm_scale=sm_scale,
                dtypes=(q_data_type, kv_data_type, o_data_type),
                fixed_split_size=fixed_split_size,
                disable_split_kv=disable_split_kv,
            ),
            (indptr, indices, last_page_len),
        )

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        *args: Any,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: torch.Tensor | None = None,
        q_len_per_req: int | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        kv_cache_sf: Any = None,
    ) -> Any:
        _refuse(
            args=args,
            sinks=sinks,
            q_len_per_req=q_len_per_req,
            skip_softmax=skip_softmax_threshold_scale_factor,
            kv_cache_sf=kv_cache_sf,
        )
        return self._run(
            q,
            paged_kv_cache,
            scales=(q_scale, k_scale, v_scale),
            out=out,
            lse=lse,
            return_lse=return_lse,
            window_left=window_left,
        )


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        paged_kv_indptr_buf: torch.Tensor | None = None,
        paged_kv_indices_buf: torch.Tensor | None = None,
        paged_kv_last_page_len_buf: torch.Tensor | None = None,
        custom_mask_buf: torch.Tensor | None = None,
        mask_indptr_buf: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
        variant_owns_mask: bool = False,
    ) -> None:
        self._open(
            float_workspace_buffer,
            kv_layout,
            backend,
            use_cuda_graph=use_cuda_graph,
            qo_indptr_buf=qo_indptr_buf,
            paged_kv_indptr_buf=paged_kv_indptr_buf,
            paged_kv_indices_buf=paged_kv_indices_buf,
            paged_kv_last_page_len_buf=paged_kv_last_page_len_buf,
            custom_mask_buf=custom_mask_buf,
            mask_indptr_buf=mask_indptr_buf,
            jit_args=jit_args,
            jit_kwargs=jit_kwargs,
            variant_owns_mask=variant_owns_mask,
        )

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype | None = None,
        non_blocking: bool = True,
        prefix_len_ptr: torch.Tensor | None = None,
        token_pos_in_items_ptr: torch.Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        seq_lens_q: torch.Tensor | None = None,
        block_tables: torch.Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        uniform_q_len: int | None = None,
    ) -> None:
        _refuse(
            head_dim_vo=head_dim_vo,
            custom_mask=custom_mask,
            packed_custom_mask=packed_custom_mask,
            pos_encoding_mode=pos_encoding_mode != "NONE",
            use_fp16_qk_reduction=use_fp16_qk_reduction,
            logits_soft_cap=logits_soft_cap,
            rope_scale=rope_scale,
            rope_theta=rope_theta,
            prefix_len_ptr=prefix_len_ptr,
            token_pos_in_items_ptr=token_pos_in_items_ptr,
            token_pos_in_items_len=token_pos_in_items_len,
            max_item_len_ptr=max_item_len_ptr,
            seq_lens=seq_lens,
            seq_lens_q=seq_lens_q,
            block_tables=block_tables,
            max_token_per_sequence=max_token_per_sequence,
            max_sequence_kv=max_sequence_kv,
            uniform_q_len=uniform_q_len,
        )
        self._hold(
            self._make_plan(
                qo_indptr,
                paged_kv_indptr,
                paged_kv_indices,
                paged_kv_last_page_len,
                num_qo_heads=num_qo_heads,
                num_kv_heads=num_kv_heads,
                head_dim=head_dim_qk,
                page_size=page_size,
                causal=causal,
                window_left=window_left,
                sm_scale=sm_scale,
                dtypes=(q_data_type, kv_data_type, o_data_type),
                fixed_split_size=fixed_split_size,
                disable_split_kv=disable_split_kv,
            )
        )

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        *args: Any,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        lse_base: str = "log2",
        lse_layout: str = "NH",
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: torch.Tensor | None = None,
        kv_cache_sf: Any = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        use_fp16_softmax: bool | None = None,
        uses_spcompress: bool | None = None,
    ) -> Any:
        _refuse(
            args=args,
            lse_base=lse_base != "log2",
            lse_layout=lse_layout != "NH",
            sinks=sinks,
            kv_cache_sf=kv_cache_sf,
            skip_softmax=skip_softmax_threshold_scale_factor,
            use_fp16_softmax=use_fp16_softmax,
            uses_spcompress=uses_spcompress,
        )
        return self._run(
            q,
            paged_kv_cache,
            scales=(q_scale, k_scale, v_scale),
            out=out,
            lse=lse,
            return_lse=return_lse,
            window_left=window_left,
        )


def merge_state_in_place(
    v: torch.Tensor,
    s: torch.Tensor,
    v_other: torch.Tensor,
    s_other: torch.Tensor,
    mask: torch.Tensor | None = None,
) -> None:
    _refuse(mask=mask)
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


def _check_fixed(
    buffers: tuple[torch.Tensor, torch.Tensor, torch.Tensor], tables: tuple[torch.Tensor, ...]
) -> None:
    (_, indices, last), (_, own_indices, own_last) = buffers, tables
    if len(own_last) != len(last):
        raise ValueError(
            f"The batch size should be fixed in cudagraph mode, the runtime batch size {len(own_last)} "
            f" mismatches the batch size set during initialization {len(last)}"
        )
    if len(own_indices) > len(indices):
        raise ValueError("The size of indices should be less than or equal to the allocated buffer")


def _refuse(**given: object) -> None:
    """Raises NotImplementedError for what the emulator doesn't know."""
    wrong = [name for name, value in given.items() if value is not None and not _is_off(value)]
    if wrong:
        raise NotImplementedError(f"not emulated: {', '.join(wrong)}")


def _is_off(value: object) -> bool:
    return not torch.is_tensor(value) and not value


def _tile(mean_packed: int, head_dim: int) -> int:
    if mean_packed > 64 and head_dim < 256:
        return 128
    return 64 if mean_packed > 16 else 16


def _split(
    num_tiles: list[int], pages: list[int], page_size: int, fixed: int | None, is_disabled: bool
) -> int | None:
    """Pages that one thread block meets."""
    if is_disabled:
        return None
    if fixed is not None:
        assert fixed >= 1
        return fixed
    split = max(128 // page_size, 1)  # no shorter ones, and no more thread blocks than there are

    def num_blocks() -> int:
        return sum(t * -(-p // split) for t, p in zip(num_tiles, pages, strict=True))

    while split < max(pages) and num_blocks() > NUM_THREAD_BLOCKS:
        split += 1
    return split


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
    return (out / total).to(plan.o_dtype), lse
