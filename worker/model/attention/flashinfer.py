"""Attention over paged KV on CUDA, by FlashInfer's kernels; its package is imported here alone, when needed.

FlashInfer plans a batch on the host, once a step, and runs the plan once a layer. A split becomes a plan
for the rows of one new token, one for the longer segments (of each window), and one for all shared prefixes
together, whose tokens are merged in by log-sum-exp: by FlashInfer's own merge, since its are to the base 2.

Pages are our blocks. A layer's memory [num_slots, 2, kv_heads, head_dim] is FlashInfer's layout NHD, with
keys and values as two strided views; nothing is copied. `ops.write` stays the only writer of KV: it stores
keys and values in one scatter, by slots that a step has anyway, and saturates float8. append_paged_kv_cache
wants a page table of its own for the same bytes, casts nothing, and would be one more kernel to build.

The kernels are "fa2": the only ones with fixed splits, and on every device since Ampere. On Hopper "fa3"
computes long segments: its tiles hold queries of one head, and meet all their keys in one thread block.
"""

import logging
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from mallee.worker.forward import Row
from mallee.worker.memory.transfer import Mark, sent, staged
from mallee.worker.model import installation
from mallee.worker.model.attention.base import (
    NEVER_SHARED,
    UNBOUNDED,
    AttentionSplit,
    Ints,
    Segment,
    SharedPrefix,
    split_batch,
)
from mallee.worker.model.attention.torch import TorchAttention

log = logging.getLogger(__name__)

MIN_SHARED_TOKENS = 16_384
"""A prefix must spare this many key reads a layer. To be measured on a GPU: guessed from 20 us for another
launch and its merge, in which an H200 reads 80 MB: 20 000 keys and values of 8 heads of 128 in bfloat16."""
SPLIT_TOKENS = 2048
"""In deterministic mode, keys of a decode row that one thread block meets. To be measured on a GPU."""
WORKSPACE_NBYTES = 128 << 20
"""For the parts of rows whose keys several thread blocks share out: what FlashInfer recommends."""
MIN_TENSOR_CORE_GROUP = 4
"""Query heads per key head from which on decode rows fill a tile of tensor cores well enough."""
MIN_FA3_TOKENS = 128
"""Of a segment for "fa3": a tile of its queries. To be measured on a GPU."""
HOPPER = (9, 0)
_TIMED_TOKENS, _TIMED_BEFORE = 512, 8192  # of the chunk by which "fa3" is weighed against "fa2"
_MOST_ERROR = 2e-2  # of the largest number of a trial
DTYPES = (torch.float16, torch.bfloat16)
HEAD_DIMS = (64, 128, 256)

Kernels: TypeAlias = Literal["decode", "fa2", "fa3"]
"""Of rows of one token, and of longer segments."""
Tokens: TypeAlias = slice | torch.Tensor
"""Tokens of the flat batch, as an index: a slice where they are neighbours, and so a view."""


class FlashInferUnavailable(ImportError):
    """FlashInfer can't run here, or not this model. The text says why, and the remedy."""


def find_flashinfer(device: str) -> Any:
    """The installed package. Raises FlashInferUnavailable."""
    try:
        import flashinfer
    except ImportError as e:
        raise FlashInferUnavailable(
            f"FlashInfer is not installed ({e}): {installation.INSTALL_FLASHINFER}"
        ) from e
    reason = installation.wrong_release(str(flashinfer.__version__))
    reason = reason or installation.no_kernels(
        installation.num_prebuilt(), installation.missing_tools()
    )
    if reason is not None:
        raise FlashInferUnavailable(reason)
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        raise FlashInferUnavailable(
            f"FlashInfer's kernels need compute capability 8.0, {device} has"
            f" {capability[0]}.{capability[1]}"
        )
    return flashinfer


def check_supported(*, dtype: torch.dtype, kv_dtype: torch.dtype, head_dim: int) -> None:
    """Raises FlashInferUnavailable if there are no kernels for these."""
    if dtype not in DTYPES:
        raise FlashInferUnavailable(f"FlashInfer doesn't compute in {dtype}; give dtype bfloat16")
    if kv_dtype not in (dtype, torch.float8_e4m3fn):
        raise FlashInferUnavailable(
            f"FlashInfer doesn't read KV in {kv_dtype} for {dtype}; give kv_dtype auto or fp8"
        )
    if head_dim not in HEAD_DIMS:
        raise FlashInferUnavailable(
            f"FlashInfer has no kernels for head_dim {head_dim}, only for {HEAD_DIMS}"
        )


class Part:
    """Some tokens of a batch over the keys of one plan. The wrapper keeps the plan as long as this lives."""

    __slots__ = ("__weakref__", "tokens", "wrapper")

    def __init__(self, wrapper: Any, tokens: Tokens) -> None:
        self.wrapper = wrapper
        self.tokens = tokens


class Level(NamedTuple):
    """Shared prefixes that have no token in common: their outputs, and the tokens that these are of."""

    outputs: slice
    tokens: Tokens


class Parts(NamedTuple):
    """A split as this backend runs it. With `levels`, the own parts' log-sum-exps are wanted."""

    own: tuple[Part, ...]
    shared: Part | None
    levels: tuple[Level, ...]


class Pages(NamedTuple):
    """Page tables of several rows, as FlashInfer takes them: int32, on the host, where plans are made.

    Pinned for a GPU, to which FlashInfer copies them: from other memory the driver may wait before that.
    """

    indptr: torch.Tensor  # [rows + 1]
    indices: torch.Tensor  # [indptr[-1]]
    last_page_len: torch.Tensor  # [rows], 1 .. page size


class Kind(NamedTuple):
    """Segments of one kind share a plan."""

    kernels: Kernels
    window_left: int  # keys before its own that a token sees; -1: all
    tile: int  # see `FlashInferAttention._tile`


class FlashInferAttention:
    """As `TorchAttention`, on CUDA, for what `check_supported` lets pass.

    A wrapper holds one plan at a time, so each plan of a step has its own; they are used again when the
    step's `Parts` are gone.
    """

    def __init__(
        self,
        package: Any,
        *,
        device: str,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
        block_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        windows: Sequence[int | None] = (None,),
        capability: tuple[int, int] = (0, 0),
        seconds: Callable[[Callable[[], object]], float] | None = None,
        is_deterministic: bool = False,
        min_shared_tokens: int = MIN_SHARED_TOKENS,
    ) -> None:
        """Kernels for layers of `windows` are built here: some minutes, the first time on a machine.

        `capability` is the device's. Where it has "fa3", that is tried here against `TorchAttention`, and
        by `seconds`, the time of work on the device (None: not timed), against "fa2".
        With `is_deterministic` what a row gets doesn't depend on the rows beside it: nothing is read
        together, and a row's keys are shared out between thread blocks by its own length alone.
        """
        self._package = package
        self._device = torch.device(device)
        self._dtype, self._kv_dtype = dtype, kv_dtype
        self._block_size = block_size
        self._num_heads, self._num_kv_heads, self._head_dim = num_heads, num_kv_heads, head_dim
        self._group = num_heads // num_kv_heads
        self._is_deterministic = is_deterministic
        self.min_saving = -(-min_shared_tokens // block_size)
        if is_deterministic:
            self.min_saving = NEVER_SHARED
        self._workspace = torch.zeros(WORKSPACE_NBYTES, dtype=torch.uint8, device=self._device)
        self._pools: dict[Kernels, list[_Entry]] = {"decode": [], "fa2": [], "fa3": []}
        self._fa3_refusal = ""  # `_build` has no segments for it
        for window in windows:
            try:
                self._build(window)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as e:  # of a compiler, a linker, or a kernel that was built ahead
                raise FlashInferUnavailable(
                    f"FlashInfer's kernels can't be built or don't run here ({e}): `mallee doctor` looks at"
                    " what builds them, docs/gpu.md says how they are built ahead"
                ) from e
        self._fa3_refusal = self._refusal(capability, windows, seconds)
        log.info("attention: %s", self.label)

    def prepare(self, split: AttentionSplit) -> Parts:
        """`split` as plans, which hold until it is dropped."""
        kinds: dict[Kind, list[Segment]] = {}
        for segment in split.segments:
            kinds.setdefault(self._kind(segment), []).append(segment)
        own = tuple(self._plan_own(kind, segments) for kind, segments in kinds.items())
        shared, levels = self._plan_shared(split) if split.shared else (None, ())
        return Parts(own, shared, levels)

    def attend(
        self, reads: Parts, q: torch.Tensor, memory: torch.Tensor, *, scale: float
    ) -> torch.Tensor:
        pages = memory.view(-1, self._block_size, *memory.shape[1:])
        kv = (pages[:, :, 0], pages[:, :, 1])  # each [num_blocks, block_size, kv_heads, head_dim]
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        for part in reads.own:
            _run_own(part, q, kv, scale, out=out, lse=lse if reads.levels else None)
        if reads.shared is not None:
            queries = q[reads.shared.tokens]
            seen, seen_lse = reads.shared.wrapper.run(queries, kv, q_scale=scale, return_lse=True)
            for level in reads.levels:
                own, own_lse = out[level.tokens], lse[level.tokens]
                self._package.merge_state_in_place(
                    own, own_lse, seen[level.outputs], seen_lse[level.outputs]
                )
                if not isinstance(level.tokens, slice):  # then those are copies
                    out[level.tokens], lse[level.tokens] = own, own_lse
        return out

    @property
    def label(self) -> str:
        if not self._fa3_refusal:
            return f"FlashInfer, segments from {MIN_FA3_TOKENS} tokens on by fa3"
        return f"FlashInfer, by fa2: {self._fa3_refusal}"

    @property
    def is_deterministic(self) -> bool:
        return self._is_deterministic

    @property
    def workspace(self) -> torch.Tensor:
        return self._workspace

    def decode_wrapper(self, **buffers: Any) -> Any:
        """A new wrapper for rows of one token; with `buffers` its plans are kept in them."""
        return self._package.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace,
            "NHD",
            use_tensor_cores=self._has_wide_decodes,
            backend="fa2",
            **buffers,
        )

    @property
    def _has_wide_decodes(self) -> bool:
        """Whether rows of one token are for tensor cores."""
        is_narrow = self._dtype == self._kv_dtype and self._group < MIN_TENSOR_CORE_GROUP
        return self._is_deterministic or not is_narrow

    def decode_options(self, window_left: int) -> dict[str, Any]:
        """The arguments of a wrapper's plan beside its pages."""
        return {
            "num_qo_heads": self._num_heads,
            "num_kv_heads": self._num_kv_heads,
            "head_dim": self._head_dim,
            "page_size": self._block_size,
            "window_left": window_left,
            "sm_scale": 1.0,  # `q_scale` multiplies it, and comes with each layer, as FP8 scales would
            "q_data_type": self._dtype,
            "kv_data_type": self._kv_dtype,
        }

    def pages(self, segments: Sequence[Segment]) -> Pages:
        """The page tables of `segments`, up to their last tokens."""
        return self._pages([s.blocks for s in segments], [s.last + s.size for s in segments])

    def _build(self, window: int | None) -> None:
        """Run all that layers of `window` run, once: kernels are built by their first plan."""
        blocks = np.zeros(-(-2 // self._block_size), dtype=np.int32)
        first = UNBOUNDED if window is None else 1 - window
        segments = (Segment(0, 1, blocks[:1], first, 0), Segment(1, 2, blocks, first, 0))
        shared = () if self._is_deterministic else (SharedPrefix(blocks[:1], np.arange(3)),)
        reads = self.prepare(AttentionSplit(self._block_size, 3, shared, segments))
        kept = (self._block_size, 2, self._num_kv_heads, self._head_dim)
        memory = torch.zeros(kept, dtype=self._kv_dtype, device=self._device)
        shape = (3, self._num_heads, self._head_dim)
        q = torch.zeros(shape, dtype=self._dtype, device=self._device)
        self.attend(reads, q, memory, scale=1.0)

    def _refusal(
        self,
        capability: tuple[int, int],
        windows: Sequence[int | None],
        seconds: Callable[[Callable[[], object]], float] | None,
    ) -> str:
        """The reason why "fa3" computes nothing here; empty if it does."""
        if capability != HOPPER:
            return "fa3 is for compute capability 9.0"
        if self._kv_dtype != self._dtype:
            return f"fa3 reads no KV in {self._kv_dtype} for queries in {self._dtype}"
        try:
            wrong = [e for e in map(self._fa3_error, windows) if not e < _MOST_ERROR]
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError) as e:
            refusal = f"fa3 doesn't run here ({e})"
        else:
            if not wrong:
                return "" if seconds is None else self._delay(seconds)
            refusal = f"fa3 is wrong by {wrong[0]:.2g} of the largest number"
        log.warning("prompts on %s are computed by fa2: %s", self._device, refusal)
        return refusal

    def _delay(self, seconds: Callable[[Callable[[], object]], float]) -> str:
        """The reason if "fa3" takes longer than "fa2" for a chunk over a long text; else empty."""
        n = _TIMED_TOKENS
        blocks = np.zeros(-(-(_TIMED_BEFORE + n) // self._block_size), dtype=np.int32)
        pages = self.pages([Segment(0, n, blocks, UNBOUNDED, _TIMED_BEFORE)])
        kept = (1, self._block_size, self._num_kv_heads, self._head_dim)
        kv = tuple(torch.randn(kept).to(self._device, self._kv_dtype) for _ in range(2))
        q = torch.randn(n, self._num_heads, self._head_dim).to(self._device, self._dtype)
        kinds: tuple[Kernels, Kernels] = ("fa2", "fa3")
        parts = [
            self._plan_prefill(Kind(kernels, -1, 0), pages, np.array([n]), slice(0, n), causal=True)
            for kernels in kinds
        ]
        fa2, fa3 = (seconds(partial(part.wrapper.run, q, kv, q_scale=0.1)) for part in parts)
        if fa3 < fa2:
            return ""
        return f"fa3 takes {1e6 * fa3:.0f} us for a chunk, fa2 {1e6 * fa2:.0f}"

    def _fa3_error(self, window: int | None) -> float:
        """The largest difference from `TorchAttention`: two long rows that share blocks, under `window`."""
        size, n = self._block_size, MIN_FA3_TOKENS + 37
        starts = (2 * size + 1, 2 * size)
        own = -(-n // size) + 1
        order = np.random.default_rng(0).permutation(2 * own + 2).astype(np.int32)
        tables = [np.append(order[:2], order[2 + i * own :][:own]) for i in range(2)]
        tokens = np.zeros(n, dtype=np.uint32)
        rows = [Row(tokens, start, table, 0) for start, table in zip(starts, tables, strict=True)]
        split = split_batch(
            rows,
            block_size=size,
            window=window,
            min_saving=NEVER_SHARED if self._is_deterministic else 1,
        )
        generator = torch.Generator().manual_seed(0)
        kept = (len(order) * size, 2, self._num_kv_heads, self._head_dim)
        memory = torch.randn(kept, generator=generator).to(self._device, self._kv_dtype)
        shape = (2 * n, self._num_heads, self._head_dim)
        q = torch.randn(shape, generator=generator).to(self._device, self._dtype)
        plain = TorchAttention(size, str(self._device))
        scale = self._head_dim**-0.5
        found = self.attend(self.prepare(split), q, memory, scale=scale).float()
        expected = plain.attend(plain.prepare(split), q, memory, scale=scale).float()
        return float((found - expected).abs().max() / expected.abs().max())

    def _kind(self, segment: Segment) -> Kind:
        """By the segment alone, so that no row's kernels depend on those beside it."""
        if segment.size == 1:
            return Kind("decode", segment.window_left, 0)
        if segment.size >= MIN_FA3_TOKENS and not self._fa3_refusal:
            return Kind("fa3", segment.window_left, 0)
        tile = self._tile(segment.size) if self._is_deterministic else 0
        return Kind("fa2", segment.window_left, tile)

    def _tile(self, size: int) -> int:
        """The class of tile that a plan of segments of `size` alone would have.

        FlashInfer chooses one tile per plan, by the mean length of its segments times the group
        (FA2DetermineCtaTileQ), and another tile adds up in another order.
        """
        packed = size * self._group
        return (packed > 16) + (packed > 64)

    def _plan_own(self, kind: Kind, segments: list[Segment]) -> Part:
        pages = self.pages(segments)
        begins = np.array([s.begin for s in segments])
        sizes = np.array([s.size for s in segments])
        tokens = self._tokens(_ranges(begins, sizes))
        if kind.kernels == "decode":
            return self._plan_decode(pages, kind.window_left, tokens)
        return self._plan_prefill(kind, pages, sizes, tokens, causal=True)

    def _plan_shared(self, split: AttentionSplit) -> tuple[Part, tuple[Level, ...]]:
        """All prefixes in one plan, by depth: a token's outer prefix before its inner."""
        depths = np.zeros(split.num_tokens, dtype=np.int64)
        by_level: dict[int, list[SharedPrefix]] = {}
        for prefix in split.shared:  # outer ones come first
            level = int(depths[prefix.tokens].max())
            depths[prefix.tokens] = level + 1
            by_level.setdefault(level, []).append(prefix)
        levels, ordered, begin = [], [], 0
        for _, prefixes in sorted(by_level.items()):
            tokens = np.concatenate([prefix.tokens for prefix in prefixes])
            levels.append(Level(slice(begin, begin + len(tokens)), self._tokens(tokens)))
            begin += len(tokens)
            ordered += prefixes
        lengths = [len(prefix.blocks) * split.block_size for prefix in ordered]
        pages = self._pages([prefix.blocks for prefix in ordered], lengths)
        sizes = np.array([len(prefix.tokens) for prefix in ordered])
        queries = self._tokens(np.concatenate([prefix.tokens for prefix in ordered]))
        part = self._plan_prefill(Kind("fa2", -1, 0), pages, sizes, queries, causal=False)
        return part, tuple(levels)

    def _plan_decode(self, pages: Pages, window_left: int, tokens: Tokens) -> Part:
        options, given = self.decode_options(window_left), tuple(pages)
        kernels: Kernels = "decode"
        if self._has_wide_decodes:
            # FlashInfer's wrapper of decodes copies the rows' places from pageable memory, and CUDA may wait
            # for the device before it does. That of longer rows runs the same kernels, and takes ours.
            kernels = "fa2"
            given = (self._indptr(np.ones(len(pages.last_page_len), dtype=np.int64)), *pages)
            options["head_dim_qk"] = options.pop("head_dim")
        entry = self._take(kernels)
        if self._is_deterministic:
            options["fixed_split_size"] = max(1, SPLIT_TOKENS // self._block_size)
            nbytes, _ = entry.wrapper.workspace_size(*given, **options)
            if nbytes > len(self._workspace):
                self._grow(nbytes)
                entry = self._take(kernels)
        return entry.plan(tokens, *given, **options)

    def _plan_prefill(
        self, kind: Kind, pages: Pages, sizes: Ints, tokens: Tokens, *, causal: bool
    ) -> Part:
        options = self.decode_options(kind.window_left)
        options["head_dim_qk"] = options.pop("head_dim")
        # Fixed splits of long segments could need gigabytes; their queries keep a GPU busy anyway.
        options |= {"causal": causal, "disable_split_kv": self._is_deterministic}
        return self._take(kind.kernels).plan(tokens, self._indptr(sizes), *pages, **options)

    def _take(self, kernels: Kernels) -> "_Entry":
        """A wrapper whose plan nothing needs any more."""
        pool = self._pools[kernels]
        for entry in pool:
            if entry.is_idle:
                return entry
        if kernels == "decode":
            wrapper = self.decode_wrapper()
        else:
            wrapper = self._package.BatchPrefillWithPagedKVCacheWrapper(
                self._workspace, "NHD", backend=kernels
            )
        pool.append(_Entry(wrapper, self._device))
        return pool[-1]

    def _grow(self, nbytes: int) -> None:
        """A larger workspace; wrappers over the smaller one go when their plans do."""
        shape = nbytes + nbytes // 4
        self._workspace = torch.zeros(shape, dtype=torch.uint8, device=self._device)
        for pool in self._pools.values():
            pool.clear()

    def _pages(self, tables: Sequence[npt.NDArray[np.integer]], lengths: Sequence[int]) -> Pages:
        counts = np.array([len(table) for table in tables])
        last = np.array(lengths) - (counts - 1) * self._block_size
        assert (last >= 1).all()
        assert (last <= self._block_size).all()
        indices = np.concatenate(tables)
        return Pages(self._indptr(counts), self._staged(indices), self._staged(last))

    def _indptr(self, counts: Ints) -> torch.Tensor:
        """[0, counts[0], counts[0] + counts[1], ...]."""
        return self._staged(np.concatenate(([0], counts.cumsum())))

    def _staged(self, values: npt.NDArray[np.integer]) -> torch.Tensor:
        return staged(values.astype(np.int32), self._device)

    def _tokens(self, tokens: Ints) -> Tokens:
        if (np.diff(tokens) == 1).all():
            return slice(int(tokens[0]), int(tokens[-1]) + 1)
        return sent(tokens, self._device)


class _Entry:
    """A FlashInfer wrapper, and whether its plan is still needed."""

    __slots__ = ("_copied", "_device", "_part", "wrapper")

    def __init__(self, wrapper: Any, device: torch.device) -> None:
        self.wrapper = wrapper
        self._part: weakref.ref[Part] | None = None
        self._device = device
        self._copied: Mark | None = None

    @property
    def is_idle(self) -> bool:
        return self._part is None or self._part() is None

    def plan(self, tokens: Tokens, *args: Any, **options: Any) -> Part:
        # A plan goes to the device by an asynchronous copy from the wrapper's pinned memory, which the
        # next plan overwrites: it must wait for that copy, which may be queued behind an earlier step.
        if self._copied is not None:
            self._copied.wait()
        self.wrapper.plan(*args, **options)
        self._copied = Mark(self._device)
        part = Part(self.wrapper, tokens)
        self._part = weakref.ref(part)
        return part


def _run_own(
    part: Part,
    q: torch.Tensor,
    kv: tuple[torch.Tensor, torch.Tensor],
    scale: float,
    *,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """Outputs, and log-sum-exps where wanted, of the part's tokens go to their places."""
    at = part.tokens
    if isinstance(at, slice):
        options: dict[str, Any] = {} if lse is None else {"lse": lse[at], "return_lse": True}
        part.wrapper.run(q[at], kv, q_scale=scale, out=out[at], **options)
    elif lse is None:
        out[at] = part.wrapper.run(q[at], kv, q_scale=scale)
    else:
        out[at], lse[at] = part.wrapper.run(q[at], kv, q_scale=scale, return_lse=True)


def _ranges(begins: Ints, sizes: Ints) -> Ints:
    """begins[0] .. begins[0] + sizes[0], begins[1] .., one after the other."""
    offsets: Ints = np.repeat(begins - (sizes.cumsum() - sizes), sizes)
    return offsets + np.arange(len(offsets))
