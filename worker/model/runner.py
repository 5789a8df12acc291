"""`Forward` in torch: owns one model's weights and the KV memory of `num_blocks` blocks.

Doesn't know which sequence a row belongs to, which rows share blocks, or when a block is free.
"""

import logging
import math
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from msgspec.structs import replace

from mallee.protocol.errors import CodecError, ConfigError, WeightsMismatch
from mallee.protocol.messages import TokenLogprobs
from mallee.protocol.model import ModelSpec, WeightVersion
from mallee.worker.forward import Draw, Drawing, ForwardBatch, Logits, LogprobQuery, Row
from mallee.worker.gaps import ClockMarks, WorkGaps
from mallee.worker.kv.node import BlockCopy
from mallee.worker.kv.sides.group import row_spans
from mallee.worker.memory.budget import GRAPHS, Budget, Room, Work, check_context
from mallee.worker.memory.copies import CudaCopies, CudaMarks
from mallee.worker.memory.errors import memory_errors, start_errors
from mallee.worker.memory.transfer import sent
from mallee.worker.model.attention.base import NEVER_SHARED
from mallee.worker.model.attention.flashinfer import FlashInferAttention
from mallee.worker.model.backend import check_device, choose_backend, choose_sampler
from mallee.worker.model.config import (
    DTYPE_NBYTES,
    FP8,
    ModelConfig,
    model_spec,
    resolve_kv_dtype,
)
from mallee.worker.model.decoder import Decoder, LayerMemory
from mallee.worker.model.graphs.decode import (
    MAX_ROWS,
    NO_GRAPHS,
    DecodeGraphs,
    GraphOptions,
    GraphStats,
    Model,
    make_graphs,
    padding_row,
)
from mallee.worker.model.identity import kv_identity
from mallee.worker.model.kv_memory import GroupedKV, TorchKV
from mallee.worker.model.loading.checkpoint import weights_digest
from mallee.worker.model.loading.config_json import read_config
from mallee.worker.model.loading.update import WeightUpdate
from mallee.worker.model.loading.vocabulary import check_same_tokens
from mallee.worker.model.loading.weights import ModelWeights, load_weights
from mallee.worker.model.ops import movable
from mallee.worker.model.plan import make_plan
from mallee.worker.model.sampling.device import draw_nbytes
from mallee.worker.model.sampling.sampler import Drawn
from mallee.worker.model.states import EXTRA_SLOTS, Folds, layer_states, make_folds
from mallee.worker.transfer.values import BATCH_BLOCKS

log = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, FP8: torch.float8_e4m3fn}
_LINE = 64


class MemoryStats(NamedTuple):
    """Bytes of the device: of weights and KV, and of all that torch has taken (None: of host memory)."""

    weights: int
    kv: int
    reserved: int | None
    graphs: int = 0  # of what torch has taken


class DeviceDrawing:
    """A `Drawing` of a `TorchForward`. `reports`: log-probabilities, if any are wanted."""

    __slots__ = ("drawn",)

    def __init__(self, drawn: Drawn) -> None:
        self.drawn = drawn

    def collect(self) -> list[int]:
        with memory_errors(self.drawn.tokens.device):
            return self.drawn.collect()

    def logprobs(self) -> list[TokenLogprobs]:
        with torch.inference_mode(), memory_errors(self.drawn.tokens.device):
            return self.drawn.logprobs()


class TorchForward:
    """Computes over paged KV on one device. Not thread-safe: one engine loop owns it."""

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        spec: ModelSpec,
        *,
        num_blocks: int,
        block_size: int = 16,
        kv_dtype: torch.dtype | None = None,
        shares_reads: bool = True,
        uses_kernels: bool = True,
        is_deterministic: bool = False,
        flashinfer: Any = None,
        memories: list[torch.Tensor] | None = None,
        graphs: GraphOptions | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """KV memory is allocated here, in `kv_dtype` (None: the weights' own), unless it is given.

        `shares_reads` False reads every row's keys apart; `uses_kernels` False computes in torch
        operations alone. `is_deterministic`, `flashinfer`: see `choose_backend`. `graphs`: of decode steps,
        recorded here (None: there are none). `clock` times the gaps in its work, where no device does.
        """
        if num_blocks < 1 or block_size < 1:
            raise ConfigError(f"num_blocks={num_blocks}, block_size={block_size}: need 1 or more")
        self._device = str(weights.embedding.device)
        dtype = weights.embedding.dtype
        kv_dtype = kv_dtype or dtype
        backend = choose_backend(
            config,
            dtype=dtype,
            kv_dtype=kv_dtype,
            device=self._device,
            block_size=block_size,
            uses_kernels=uses_kernels,
            is_deterministic=is_deterministic,
            flashinfer=flashinfer,
        )
        self._attention = backend.attention
        self._sampler = choose_sampler(self._device, dtype, config.vocab_size)
        self.decoder = Decoder(
            config,
            weights,
            attention=self._attention,
            ops=backend.ops,
            max_positions=spec.max_model_len,
        )
        self.spec = spec
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.shares_reads = shares_reads
        slot = (2, config.num_kv_heads, config.head_dim)
        sizes = [group.num_blocks(num_blocks, block_size) for group in spec.groups]
        self._memories = memories or [  # with a block for rows of padding, that no pool hands out
            _lazy_zeros((blocks + EXTRA_SLOTS, group.nbytes), torch.uint8, self._device)
            if group.kind == "state"
            else _lazy_zeros(
                (len(group.layers), (blocks + 1) * block_size, *slot), kv_dtype, self._device
            )
            for group, blocks in zip(spec.groups, sizes, strict=True)
        ]
        kept = self._kept()
        self._memory = kept[0]  # of the full group
        layers: dict[int, LayerMemory] = {}
        self._fold: Callable[[Sequence[Row]], Folds] | None = None
        self._folds: Folds | None = None  # of the last pass
        for group, memory, number in zip(spec.groups, self._memories, sizes, strict=True):
            own: Iterable[LayerMemory] = memory
            if group.kind == "state":
                assert config.delta is not None, "states of a model without recurrent layers"
                own = layer_states(memory, config.delta, dtype, len(group.layers))
                self._fold = partial(
                    make_folds,
                    group=spec.groups.index(group) - 1,
                    num_slots=number,
                    conv_width=config.delta.conv_width,
                    device=torch.device(self._device),
                )
            layers |= zip(group.layers, own, strict=True)
        self._layers = [layers[i] for i in range(config.num_layers)]
        self._windows = tuple(group.window for group in spec.sides if group.kind == "window")
        copies = CudaCopies(there) if (there := self._memory.device).type == "cuda" else None
        self.memory = TorchKV(self._memory, block_size, copies)
        if spec.sides:
            spans = row_spans(spec.groups, num_blocks, block_size)
            self.memory = GroupedKV(kept, block_size, spans, copies)
        self.budget: Budget | None = None  # of the device, where KV was sized by it
        self.is_unified = False  # whether the host's memory is the device's
        self.draft: TorchForward | None = None  # a model that drafts for it, with as many blocks
        self._plan = partial(
            make_plan,
            block_size=block_size,
            device=self._device,
            windows=config.windows,
            groups=self._windows,
            fold=self._fold,
        )
        self._is_whole = True  # whether its weights are those of one version
        self._padding = padding_row(spec.groups, sizes)
        self._graph_options = graphs
        self._graphs = self._recorded()
        is_cuda = torch.device(self._device).type == "cuda"
        self.gaps = WorkGaps(CudaMarks(self._device) if is_cuda else ClockMarks(clock))

    def _recorded(self) -> DecodeGraphs | None:
        attention, options = self._attention, self._graph_options
        if options is None:
            return None
        if options.device is None and torch.device(self._device).type != "cuda":
            return None
        if not isinstance(attention, FlashInferAttention) or attention.is_deterministic:
            log.info(
                "no CUDA graphs: they need FlashInfer's attention, and not engine.deterministic"
            )
            return None
        if self.decoder.config.experts is not None:
            log.info("no CUDA graphs: the host waits for how many tokens chose each expert")
            return None
        model = Model(
            decoder=self.decoder,
            attention=attention,
            layers=self._layers,
            plan=self._plan,
            padding=self._padding,
            groups=self._windows,
            fold=self._fold,
            max_blocks=min(self.num_blocks, -(-self.spec.max_model_len // self.block_size)),
            block_size=self.block_size,
        )
        return make_graphs(model, options)

    def prepare_update(self, folder: Path, version: WeightVersion) -> WeightUpdate:
        """The weights in `folder`, read and checked, for `update`. Beside steps, from any thread.

        Raises ModelNotFound, UnsupportedModel, WeightsMismatch.
        """
        config, own = read_config(folder), self.decoder.config
        differing = [f.name for f in fields(own) if getattr(config, f.name) != getattr(own, f.name)]
        if differing:
            raise WeightsMismatch(
                f"{folder}: its config differs from the served model's in {', '.join(differing)}; other"
                " models need another fleet",
                path=str(folder),
                differing=differing,
            )
        return WeightUpdate(
            folder,
            own,
            self.decoder.weights,
            kv_dtype=self._memory.dtype,
            version=version,
        )

    def update(self, update: WeightUpdate) -> None:
        """Go on with other weights, in the memory of these: no block that it filled counts any more.

        Recorded steps serve on, but for scales of KV that have changed: these are a part of them. Its draft
        model stays. Whatever is raised, nothing can be computed with these weights afterwards.
        """
        self._is_whole = False
        with torch.inference_mode():
            update.write()
            if self.decoder.read_kv_scales() and self._graphs is not None:
                self._graphs = None  # its memory is free before others are recorded
                self._graphs = self._recorded()
        self.rename(update.version)
        self._is_whole = True

    def rename(self, version: WeightVersion) -> None:
        """Call its weights `version` from now on: no block that it filled counts any more."""
        self.spec = replace(self.spec, weights=version)

    def forward(self, batch: ForwardBatch) -> Sequence[Logits]:
        """Raises DeviceMemoryExhausted, as does every method that draws, or makes or reads logits."""
        with self._working():
            self._copy(batch.copies)
            return self._run(batch.rows) if batch.rows else []

    def forward_drawn(
        self, batch: ForwardBatch, drawing: Drawing, draws: Sequence[int]
    ) -> Sequence[Logits]:
        assert isinstance(drawing, DeviceDrawing), "draws of another forward"
        with self._working():
            self._copy(batch.copies)
            return self._run(batch.rows, drawing.drawn.there(draws))

    @contextmanager
    def _working(self) -> Iterator[None]:
        """A piece of work for the device. Raises DeviceMemoryExhausted."""
        with torch.inference_mode(), memory_errors(self._device):
            self.gaps.begin()
            yield
            self.gaps.end()

    def refold(self, rows: Sequence[Row], counts: Sequence[int]) -> None:
        assert self._fold is not None, "no layer is recurrent"
        assert self._folds is not None, "no pass before"
        kept = [replace(row, tokens=row.tokens[:n]) for row, n in zip(rows, counts, strict=True)]
        with torch.inference_mode(), memory_errors(self._device):
            folds = self._fold(kept)
            begins = (self._folds.begins[slot] for slot in folds.begins)  # no wait for the device
            places = [begin + np.arange(n) for begin, n in zip(begins, counts, strict=True)]
            tokens = sent(np.concatenate(places), torch.device(self._device))
            self.decoder.refold(folds, tokens, self._layers)

    def _run(self, rows: Sequence[Row], tokens: torch.Tensor | None = None) -> Sequence[Logits]:
        """The logits that `rows` want. `tokens` [n], if they are on the device already, are the rows' own."""
        assert self._is_whole, "weights that were written in part"
        graph = None
        least = self._attention.min_saving if self.shares_reads else NEVER_SHARED
        if self._graphs is not None:
            graph = self._graphs.choose(rows, least)
        if graph is not None:
            plan = graph.plan(rows)
            logits = graph.replay(plan, tokens)[
                : len(rows)
            ].clone()  # the next replay has them there
        else:
            plan = self._plan(
                rows,
                prepare=self._attention.prepare,
                min_saving=least,
            )
            if tokens is not None:
                plan = plan._replace(tokens=tokens)
            self._folds = plan.folds
            logits = self.decoder.logits(plan, self._layers)
        return logits.unbind(0)

    @property
    def is_beside_host(self) -> bool:
        """Whether passes run beside the host, so that it pays to launch the next one early."""
        return torch.device(self._device).type == "cuda"

    @property
    def row_nbytes(self) -> int:
        return self.spec.vocab_size * self.decoder.weights.embedding.dtype.itemsize

    def keep(self, logits: Logits) -> Logits:
        with memory_errors(self._device):
            return logits.clone()

    def dump(self, logits: Logits) -> bytes:
        with memory_errors(self._device):
            raw: bytes = logits.contiguous().cpu().view(torch.uint8).numpy().tobytes()
            return raw

    def undump(self, raw: bytes) -> Logits:
        dtype = self.decoder.weights.embedding.dtype
        if len(raw) != self.row_nbytes:
            text = f"logits of {len(raw)} bytes; a row has {self.row_nbytes}"
            raise CodecError(text, nbytes=len(raw))
        row = torch.frombuffer(bytearray(raw), dtype=dtype)
        if not bool(torch.isfinite(row).all()):
            raise CodecError("logits that are no numbers", nbytes=len(raw))
        with memory_errors(self._device):
            return row.to(self._device)

    def sample(self, draws: Sequence[Draw]) -> list[int]:
        with self._working():
            return self._sampler.sample(draws)

    def launch_draws(self, draws: Sequence[Draw]) -> Drawing:
        with self._working():
            return DeviceDrawing(self._sampler.launch(draws))

    def logprobs(self, queries: Sequence[LogprobQuery]) -> list[TokenLogprobs]:
        with self._working():
            return self._sampler.logprobs(queries)

    def check(self) -> None:
        """Raises AssertionError if the memory is not what the spec and the counts say."""
        nbytes = self.spec.kv_nbytes(self.num_blocks, self.block_size)
        assert self._kv_nbytes == nbytes, "KV memory and spec disagree"

    def graph_stats(self) -> GraphStats:
        return NO_GRAPHS if self._graphs is None else self._graphs.stats()

    def memory_stats(self) -> MemoryStats:
        """With those of its draft model. From any thread."""
        reserved = None
        if torch.device(self._device).type == "cuda":
            reserved = torch.cuda.memory_reserved(self._device)
        models = [self] if self.draft is None else [self, self.draft]
        weights = sum(model.decoder.weights.nbytes for model in models)
        graphs = sum(model._graphs.nbytes for model in models if model._graphs is not None)
        return MemoryStats(weights, sum(model._kv_nbytes for model in models), reserved, graphs)

    def _kept(self) -> list[torch.Tensor]:
        """The memory of each group without that of padding."""
        return [
            memory[:-EXTRA_SLOTS] if group.kind == "state" else memory[:, : -self.block_size]
            for group, memory in zip(self.spec.groups, self._memories, strict=True)
        ]

    @property
    def _kv_nbytes(self) -> int:
        return sum(memory.nbytes for memory in self._kept())

    def _copy(self, copies: Sequence[BlockCopy]) -> None:
        """Forks of one capsule copy the same count of slots: those go together."""
        by_size: dict[int, list[BlockCopy]] = {}
        for copy in copies:
            by_size.setdefault(copy.num_slots, []).append(copy)
        size = self.block_size
        for num_slots, same in by_size.items():
            offsets = np.arange(num_slots)
            for g, kept in enumerate(self._memories):
                if self.spec.groups[g].kind == "state":
                    continue  # a pass reads one slot and writes another
                pairs = [(c.sides[g - 1] if g and c.sides else c[:2]) for c in same]
                slots = np.array(pairs)[:, :, None] * size + offsets
                sources, targets = sent(slots, torch.device(self._device)).unbind(1)
                memory = movable(kept)
                memory.index_copy_(1, targets.flatten(), memory.index_select(1, sources.flatten()))


class _Read(NamedTuple):
    """A model's weights, and all else that it takes to compute with them."""

    config: ModelConfig
    weights: ModelWeights
    spec: ModelSpec
    kv_dtype: torch.dtype


def load(
    path: Path,
    *,
    num_blocks: int | None = None,
    kv_budget_bytes: int | None = None,
    block_size: int = 16,
    dtype: str = "auto",
    kv_dtype: str = "auto",
    device: str = "cpu",
    deterministic: bool = False,
    uses_kernels: bool = True,
    threads: int | None = None,
    name: str | None = None,
    max_model_len: int | None = None,
    room: Room | None = None,
    draft: Path | None = None,
) -> TorchForward:
    """The model in the Hugging Face directory `path`, ready to run.

    Give `num_blocks`, or `kv_budget_bytes` to have as many as fit, or `room` on the device: then KV gets
    what it leaves, and a `max_model_len` that is given must fit. On unified memory `room`'s host tier is KV
    beside what is given. `threads` sets torch's, for the
    whole process. device: "cpu", or "cuda" or "cuda:1" where there is one. dtype: "float32",
    "bfloat16", or "auto": the checkpoint's own, but float32 on a CPU without bfloat16 arithmetic,
    where bfloat16 is several times slower. kv_dtype: "auto" (as dtype) or "fp8", which halves KV and
    rounds it to 3 bits of fraction (on a CPU a slow emulation). `deterministic`: attention gives a row the
    same bits whatever runs beside it; on CUDA with FlashInfer alone. `uses_kernels`: see `TorchForward`.
    The context served is the model's, cut to `max_model_len` and to what the blocks hold. On CUDA decode
    steps are recorded, within what `room` has for that. `draft`: the folder of a model with the same tokens,
    loaded beside it (`TorchForward.draft`) with as many blocks, which come out of the same memory.
    Raises ModelNotFound, UnsupportedModel, WeightsMismatch, ConfigError.
    """
    check_device(device)
    if threads is not None:
        torch.set_num_threads(threads)
    if draft is not None:
        check_same_tokens(path, draft)
    before = None if room is None else room.probe(device)
    models = [
        _read(
            *(folder, folder.name if name is None or folder is draft else name),
            dtype=dtype,
            kv_dtype=kv_dtype,
            device=device,
            max_model_len=max_model_len,
        )
        for folder in (path, draft)
        if folder is not None
    ]
    specs = [model.spec for model in models]
    budget = None
    if room is not None and before is not None:
        if num_blocks is None and kv_budget_bytes is None:
            works = [work_of(*model[:3], block_size, room) for model in models]
            budget = room.split(before, *works)
            if max_model_len is not None:
                needed = -(-specs[0].max_model_len // block_size)
                check_context(budget, specs[0].max_model_len, _kv_nbytes(specs, needed, block_size))
            kv_budget_bytes = budget.kv
        else:
            wanted = _kv_nbytes(specs, num_blocks, block_size) if num_blocks else kv_budget_bytes
            num_blocks, kv_budget_bytes = None, room.given(room.probe(device), wanted or 0)
    if num_blocks is None:
        num_blocks = _affordable(kv_budget_bytes, specs, block_size)
    num_tokens = num_blocks * block_size
    if budget is not None:
        budget = budget.with_draft_kv(_kv_nbytes(specs[1:], num_blocks, block_size))
        log.info("%s, for %d tokens", budget, num_tokens)
    if specs[0].max_model_len > num_tokens:
        cut = "context cut from %d to the %d tokens the KV holds"
        log.warning(cut, specs[0].max_model_len, num_tokens)
    graphs = None
    if graphs_nbytes := GRAPHS if room is None else room.graphs:
        most = MAX_ROWS if room is None else room.max_rows
        graphs = GraphOptions(most, graphs_nbytes // len(models))
    with start_errors("taking the memory of KV", budget):
        forward, *drafts = (
            TorchForward(
                model.config,
                model.weights,
                replace(model.spec, max_model_len=min(model.spec.max_model_len, num_tokens)),
                num_blocks=num_blocks,
                block_size=block_size,
                kv_dtype=model.kv_dtype,
                uses_kernels=uses_kernels,
                is_deterministic=deterministic,
                graphs=graphs,
            )
            for model in models
        )
    forward.budget = budget
    forward.is_unified = before is not None and before.is_unified
    if drafts:
        forward.draft = drafts[0]
        forward.draft.gaps = forward.gaps  # they take turns on one device
    return forward


def _read(
    path: Path, name: str, *, dtype: str, kv_dtype: str, device: str, max_model_len: int | None
) -> _Read:
    """The model in `path`, its weights on the device."""
    config = read_config(path)
    dtype = resolve_dtype(dtype, config, device)
    kept = resolve_kv_dtype(kv_dtype, config, dtype)
    with start_errors("loading the weights"):
        weights = load_weights(
            path, config, dtype=_DTYPES[dtype], device=device, kv_dtype=_DTYPES[kept]
        )
    spec = model_spec(
        config,
        name=name,
        weights_digest=weights_digest(path),
        dtype=dtype,
        kv_dtype=kv_dtype,
        max_model_len=max_model_len,
    )
    is_scaled = weights.has_kv_scales
    identity = {
        **kv_identity(path, config, spec, kv_dtype, is_scaled=is_scaled),
        "dtype": dtype,
    }
    spec = replace(spec, kv_fields=tuple(sorted(identity.items())))
    return _Read(config, weights, spec, _DTYPES[kept])


def work_of(
    config: ModelConfig, weights: ModelWeights, spec: ModelSpec, block_size: int, room: Room
) -> Work:
    """The sizes by which a device's memory is split."""
    item = weights.embedding.dtype.itemsize
    heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    # The stream before and after, a norm, a layer's heads twice, and its MLP: gate, up, their product.
    states = 0
    if config.delta is not None:  # in float32, a few times over
        heads = max(heads, 6 * (config.delta.conv_inputs + config.delta.values))
        most_rows = min(room.max_rows, room.max_step_tokens // 2)  # of several tokens
        states = -(-most_rows * config.delta.matrix_nbytes // room.max_step_tokens)
    inner = 3 * config.intermediate_size
    if (own := config.experts) is not None:  # all tokens may choose one expert
        routed = own.num_chosen * config.hidden_size  # each token for each of its experts
        inner = max(inner, 3 * (own.shared_inner + own.inner) + 2 * routed)
    values = 3 * config.hidden_size + 2 * heads + inner
    return Work(
        weights=weights.nbytes,
        token_nbytes=values * item + states,
        row_nbytes=config.vocab_size * item,
        block_nbytes=spec.block_nbytes(block_size),
        max_rows=room.max_rows,
        max_step_tokens=room.max_step_tokens,
        kept_rows=room.kept_rows,
        staged_blocks=2 * BATCH_BLOCKS,  # one way and the other
        draw_nbytes=draw_nbytes(room.max_rows, config.vocab_size),
    )


def _kv_nbytes(specs: Sequence[ModelSpec], num_blocks: int, block_size: int) -> int:
    """Bytes of KV of all these models, so many blocks of each."""
    return sum(spec.kv_nbytes(num_blocks, block_size) for spec in specs)


def _affordable(budget_bytes: int | None, specs: Sequence[ModelSpec], block_size: int) -> int:
    """The blocks (of the full group) that the budget buys each model. Raises ConfigError if none."""
    if budget_bytes is None:
        raise ConfigError("give num_blocks or kv_budget_bytes")
    block_nbytes = _kv_nbytes(specs, 1, block_size)
    if budget_bytes < block_nbytes:
        raise ConfigError(
            f"kv_budget_bytes={budget_bytes} is less than one block of {block_nbytes} bytes; raise it"
        )
    if not any(spec.sides for spec in specs):
        return budget_bytes // block_nbytes
    most = budget_bytes // sum(spec.block_nbytes(block_size) for spec in specs)
    fits = bisect_right(
        range(most + 1), budget_bytes, key=lambda n: _kv_nbytes(specs, n, block_size)
    )
    return fits - 1


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    """Zeros, from the beginning of a cache line on.

    In host memory a page costs nothing until it is used (torch.zeros writes them all).
    """
    if torch.device(device).type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    nbytes = math.prod(shape) * dtype.itemsize
    raw = np.zeros(nbytes + _LINE, dtype=np.uint8)
    first = -raw.ctypes.data % _LINE
    return torch.from_numpy(raw[first : first + nbytes]).view(dtype).view(shape)


def resolve_dtype(dtype: str, config: ModelConfig, device: str) -> str:
    """ "float32" or "bfloat16". Raises ConfigError for any other."""
    if dtype == "auto":
        is_slow = device == "cpu" and not _has_bfloat16()
        return "bfloat16" if config.dtype == "bfloat16" and not is_slow else "float32"
    if dtype not in DTYPE_NBYTES:
        raise ConfigError(f"dtype={dtype!r}: give auto, {' or '.join(DTYPE_NBYTES)}")
    return dtype


def _has_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 matrices natively."""
    capabilities = torch.cpu.get_capabilities()
    return any(bool(capabilities.get(name)) for name in ("avx512_bf16", "amx_bf16", "bf16"))
