"""Decode steps as recorded graphs: one launch in place of the hundreds that a small step waits for.

A step of rows of one token each is filled up with rows of padding to the next power of two, and replays the
graph of that size. Rows of padding read and write a block of their own, that no pool hands out, and their
logits are dropped. Tokens, positions, slots and page tables are copied to where the graph reads them, so that
a fork, a restore or a row that ends changes contents alone: nothing is recorded after the start.

Eager stay steps with prompts or drafts, those of more rows than the largest graph, and those whose rows share
so much that reading it once saves more than a graph does. So do sizes at which a graph is no faster, or has
no memory. Trials at the start tell.

A graph reads every row's keys apart: with the shared prefixes of a step the launches change, too. So a step
has two prices: replayed, its reads at the device's bandwidth; eager, the host's time to plan and launch it,
prefixes and merges included, and the prefixes' reads once. An eager step of an 8B model takes the host 8 to
10 ms where the device needs 4 (estimated). In the difference an H200 reads some 20 GB: the keys and values of
5,000 tokens that 32 rows have in common.
What would change this: prefixes in the recorded step, as one more plan at fixed addresses, over queries in an
order of their own and with empty prefixes for rows that share nothing. FlashInfer's kernels take such plans
by their source, but no machine has shown that they replay, and nested prefixes would still be read flat.
"""

import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Literal, NamedTuple

import numpy as np
import torch
from msgspec import structs

from mallee.protocol.model import GroupSpec
from mallee.worker.forward import Row
from mallee.worker.kv.node import BlockTable
from mallee.worker.kv.sides.states import NO_STATE
from mallee.worker.memory.budget import GRAPHS, MIB
from mallee.worker.model.attention.base import NEVER_SHARED, split_batch
from mallee.worker.model.attention.flashinfer import FlashInferAttention
from mallee.worker.model.decoder import Decoder, LayerMemory
from mallee.worker.model.graphs.device import CudaGraphs, Graph, GraphDevice
from mallee.worker.model.graphs.tables import FixedDecode, FixedTables
from mallee.worker.model.plan import Plan
from mallee.worker.model.states import Folds

log = logging.getLogger(__name__)

MAX_ROWS: Final = 256
"""Of the largest graph: beyond it a step's products take longer than its launches."""

LONG_BLOCKS: Final = 256
"""Of a row in a trial that reads: on an H200 they take about a tenth of a millisecond for an 8B model."""

Reason = Literal["tokens", "rows", "shared", "off", "watched"]
"""Reasons for an eager step: rows of several tokens, too many rows, a shared prefix, a size that is off, a
tap."""


class GraphOptions(NamedTuple):
    """Graphs for up to `max_rows` rows, in `max_nbytes` of memory. `device` None: CUDA's, on CUDA."""

    max_rows: int = MAX_ROWS
    max_nbytes: int = GRAPHS
    device: GraphDevice | None = None


class GraphStats(NamedTuple):
    """Counts since the start. `nbytes`: taken by graphs and what they read and write."""

    sizes: tuple[int, ...]  # rows, rising
    num_captures: int
    num_replays: int
    num_eager: tuple[tuple[Reason, int], ...]
    nbytes: int


NO_GRAPHS: Final = GraphStats((), 0, 0, (), 0)


class Places(NamedTuple):
    """Tensors that a recorded step reads and writes beside page tables, weights and KV."""

    tokens: torch.Tensor  # [rows]
    positions: torch.Tensor  # [rows]
    slots: torch.Tensor  # [rows]
    window_slots: Mapping[int | None, torch.Tensor]  # [rows] each
    folds: Folds | None  # of rows of one token
    outputs: torch.Tensor  # [rows] 0, 1, ...
    logits: torch.Tensor  # [rows, vocab]

    def first(self, num_rows: int) -> "Places":
        """Those of a smaller step, which is never under way at the same time."""
        return Places(
            self.tokens[:num_rows],
            self.positions[:num_rows],
            self.slots[:num_rows],
            {window: slots[:num_rows] for window, slots in self.window_slots.items()},
            None if self.folds is None else self.folds.first(num_rows),
            self.outputs[:num_rows],
            self.logits[:num_rows],
        )

    def fill(self, plan: Plan) -> None:
        """Copy the tensors of `plan` here."""
        self.tokens.copy_(plan.tokens)
        self.positions.copy_(plan.positions)
        self.slots.copy_(plan.slots)
        for window, slots in self.window_slots.items():
            slots.copy_(plan.window_slots[window])
        if self.folds is not None:
            assert plan.folds is not None, "a plan without states"
            self.folds.read.copy_(plan.folds.read)
            self.folds.written.copy_(plan.folds.written)


class Model(NamedTuple):
    """Everything that steps are computed with. `layers`: KV by layer, the block of `padding` among it.

    `plan`: `make_plan`, but for rows and what depends on how they are computed.
    """

    decoder: Decoder
    attention: FlashInferAttention
    layers: Sequence[LayerMemory]
    plan: Callable[..., Plan]
    padding: Row
    groups: Sequence[int | None]  # windows that have blocks of their own
    fold: Callable[[Sequence[Row]], Folds] | None  # as in `make_plan`
    max_blocks: int  # of a row
    block_size: int


class Trial(NamedTuple):
    """Seconds of steps of as many rows: replayed and eager over one block each, replayed over more.

    `shared_s`: eager again, over one prefix of `num_shared` blocks that all share, and one block each;
    infinite if so few rows can't share enough to be read together.
    """

    replay_s: float
    eager_s: float
    long_s: float
    num_more: int  # block reads
    shared_s: float
    num_shared: int

    @property
    def gain(self) -> float:
        """The block reads that a shared prefix must spare to make up for the replay; at least none.

        Infinite if nothing makes up for it: reads take no time to speak of, or are never shared.
        """
        if self.long_s <= self.replay_s or not self.num_more:
            return math.inf
        read_s = (self.long_s - self.replay_s) / self.num_more
        return max(0.0, (self.shared_s - self.replay_s) / read_s - self.num_shared)


class DecodeGraph:
    """The recorded step of `num_rows` rows."""

    __slots__ = ("_decode", "_graph", "_model", "_places", "num_rows")

    def __init__(self, model: Model, places: Places, tables: Mapping[int, FixedTables]) -> None:
        self.num_rows = len(places.tokens)
        self._model = model
        self._places = places
        self._decode = FixedDecode(model.attention, tables, self.num_rows)
        self._graph: Graph | None = None

    def plan(self, rows: Sequence[Row]) -> Plan:
        """The plan of at most `num_rows` rows, filled up: for the next `replay`."""
        filled = [*rows, *[self._model.padding] * (self.num_rows - len(rows))]
        return self._model.plan(
            filled, prepare=self._decode.prepare, min_saving=NEVER_SHARED, keeps_windows=True
        )

    def capture(self, device: GraphDevice, beside: "DecodeGraph | None") -> None:
        """Record the step. Raises RuntimeError or ValueError where that can't be done."""
        places = self._places
        plan = self.plan([])
        places.fill(plan)
        static = plan._replace(
            tokens=places.tokens,
            positions=places.positions,
            slots=places.slots,
            window_slots=places.window_slots,
            folds=places.folds,
            outputs=places.outputs,
        )
        decoder, layers = self._model.decoder, self._model.layers

        def step() -> None:
            places.logits.copy_(decoder.logits(static, layers))

        self._graph = device.capture(step, None if beside is None else beside._graph)

    def replay(self, plan: Plan, tokens: torch.Tensor | None = None) -> torch.Tensor:
        """Scores after the rows of `plan`, the last one made: [num_rows, vocab], until the next replay.

        `tokens`, if given, are those of the first rows.
        """
        assert self._graph is not None
        self._places.fill(plan)
        if tokens is not None:
            self._places.tokens[: len(tokens)].copy_(tokens)
        self._graph.replay()
        return self._places.logits


class DecodeGraphs:
    """The graphs of a model over its KV memory."""

    __slots__ = (
        *("_eager", "_graphs", "_largest", "_model", "_nbytes", "_num_captures", "_num_replays"),
        "gains",
    )

    def __init__(
        self,
        model: Model,
        device: GraphDevice,
        sizes: Sequence[int],
        max_nbytes: int,
    ) -> None:
        """Record steps of `sizes`, the largest first: others use its memory again.

        Left out is what fails, what would take more than `max_nbytes` together, and what is no faster than an
        eager step.
        """
        self._model = model
        self._graphs: dict[int, DecodeGraph] = {}
        self._eager: Counter[Reason] = Counter()
        self._largest = max(sizes, default=0)
        self._num_captures = self._num_replays = self._nbytes = 0
        self.gains: dict[int, float] = {}
        """By size, the block reads that shared prefixes must spare to make up for a graph: `Trial.gain`."""
        if sizes:
            self._record(device, sizes, max_nbytes)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Rows of each graph, rising."""
        return tuple(sorted(self._graphs))

    @property
    def nbytes(self) -> int:
        """Memory that was taken for the graphs, and for what they read and write."""
        return self._nbytes

    def stats(self) -> GraphStats:
        eager = tuple(sorted(self._eager.items()))
        return GraphStats(self.sizes, self._num_captures, self._num_replays, eager, self._nbytes)

    def choose(self, rows: Sequence[Row], least: int) -> DecodeGraph | None:
        """The graph for a step of `rows`, which is to be replayed now; None: it must be eager.

        A shared prefix spares at least `least` block reads.
        """
        reason = self._reason(rows, least)
        if reason is not None:
            self._eager[reason] += 1
            return None
        self._num_replays += 1
        return self._graphs[padded_size(len(rows))]

    def _reason(self, rows: Sequence[Row], least: int) -> Reason | None:
        size = padded_size(len(rows))
        if any(len(row.tokens) != 1 or row.num_logits != 1 for row in rows):
            return "tokens"
        if size > self._largest:
            return "rows"
        if size not in self._graphs:
            return "off"
        if self._model.decoder.tap is not None:
            return "watched"
        return "shared" if self._shares(rows, size, least) else None

    def _shares(self, rows: Sequence[Row], size: int, least: int) -> bool:
        """Whether an eager step would save more by what it reads for several rows together."""
        block_size = self._model.block_size
        if (len(rows) - 1) * (max(row.start for row in rows) // block_size) < least:
            return False
        shared = split_batch(rows, block_size=block_size, min_saving=least).shared
        saved = sum((len(prefix.tokens) - 1) * len(prefix.blocks) for prefix in shared)
        return saved > self.gains[size]

    def _record(self, device: GraphDevice, sizes: Sequence[int], max_nbytes: int) -> None:
        begin = device.taken()
        try:
            places, tables = _room(self._model, self._largest)
        except torch.OutOfMemoryError as error:
            log.warning("no CUDA graphs: %s", _reason_of(error))
            return
        last = device.taken()
        costs = [f"{_mib(last - begin)} of tables and logits"]
        left_out: dict[int, str] = {}
        beside: DecodeGraph | None = None
        for size in sorted(sizes, reverse=True):
            try:
                graph = DecodeGraph(self._model, places.first(size), tables)
                graph.capture(device, beside)
            except (RuntimeError, ValueError) as error:
                left_out[size] = _reason_of(error)
                continue
            self._num_captures += 1
            now = device.taken()
            if now - begin > max_nbytes:
                left_out[size] = f"it needs {_mib(now - begin)}, the budget has {_mib(max_nbytes)}"
                log.warning("no CUDA graph for %d rows: %s", size, left_out[size])
                continue
            trial = self._trial(device, graph)
            told = f" ({1000 * trial.replay_s:.2f} ms, eager {1000 * trial.eager_s:.2f})"
            if trial.replay_s >= trial.eager_s:
                left_out[size] = f"it is no faster{told}"
                continue
            self.gains[size] = trial.gain
            costs.append(f"{size} rows {_mib(now - last)}{told}")
            last = now
            self._graphs[size] = beside = graph
        self._nbytes = last - begin
        log.info("CUDA graphs: %s", ", ".join(costs))
        for size, reason in left_out.items():
            log.info("steps of %d rows run without a CUDA graph: %s", size, reason)

    def _trial(self, device: GraphDevice, graph: DecodeGraph) -> Trial:
        """The times of `graph`; with their planning, since that is a part of each step."""
        model, num = self._model, graph.num_rows
        short = [model.padding] * num
        depth = max(1, min(LONG_BLOCKS, model.max_blocks, int(model.padding.table[0]) // num))
        long = [reading_row(model, depth, i) for i in range(num)]

        least = model.attention.min_saving
        num_shared = -(-least // (num - 1)) if num > 1 else model.max_blocks

        def eager(rows: Sequence[Row]) -> None:
            plan = model.plan(rows, prepare=model.attention.prepare, min_saving=least)
            model.decoder.logits(plan, model.layers)

        replay_s = device.seconds(lambda: graph.replay(graph.plan(short)))
        eager_s = device.seconds(lambda: eager(short))
        long_s = device.seconds(lambda: graph.replay(graph.plan(long)))
        shared_s = math.inf
        if num_shared < model.max_blocks:
            shared = [reading_row(model, num_shared + 1, 0)] * num
            shared_s = device.seconds(lambda: eager(shared))
        return Trial(
            replay_s=replay_s,
            eager_s=eager_s,
            long_s=long_s,
            num_more=num * (depth - 1),
            shared_s=shared_s,
            num_shared=num_shared,
        )


def make_graphs(model: Model, options: GraphOptions) -> DecodeGraphs:
    """The graphs that `options` allow."""
    device = options.device or CudaGraphs(str(model.decoder.weights.embedding.device))
    largest = padded_size(min(options.max_rows, MAX_ROWS))
    sizes = [1 << i for i in range(largest.bit_length())]
    with torch.inference_mode():
        return DecodeGraphs(model, device, sizes, options.max_nbytes)


def padded_size(num_rows: int) -> int:
    """The power of two from `num_rows` on."""
    return 1 << (num_rows - 1).bit_length()


def padding_row(groups: Sequence[GroupSpec], blocks: Sequence[int]) -> Row:
    """A row of one token at the beginning of `blocks`, by group of layers; a state is written."""
    table, *sides = (
        np.array([NO_STATE, block] if group.kind == "state" else [block], dtype=np.int32)
        for group, block in zip(groups, blocks, strict=True)
    )
    return Row(np.zeros(1, dtype=np.uint32), 0, table, 1, tuple(sides))


def reading_row(model: Model, depth: int, number: int) -> Row:
    """A row that reads `depth` blocks, other ones than its neighbours do, and writes padding's."""
    at = np.arange(number * depth, (number + 1) * depth)

    def table(padding: BlockTable) -> BlockTable:
        blocks = (at % max(1, int(padding[0]))).astype(np.int32)
        return np.append(blocks[: depth - 1], padding).astype(np.int32)

    padding = model.padding
    num = len(model.groups)
    sides = (*map(table, padding.sides[:num]), *padding.sides[num:])  # windows, states
    start = (depth - 1) * model.block_size
    return structs.replace(padding, start=start, table=table(padding.table), sides=sides)


def _room(model: Model, num_rows: int) -> tuple[Places, dict[int, FixedTables]]:
    """The tensors of the largest step, and its page tables by `Segment.window_left`."""
    table = model.decoder.weights.embedding
    config, device = model.decoder.config, table.device
    tables = {}
    for window in config.windows:
        blocks, left = model.max_blocks, -1
        if window is not None:
            blocks, left = min(blocks, -(-window // model.block_size) + 1), window - 1
        tables[left] = FixedTables(device, max_rows=num_rows, max_blocks=num_rows * blocks)

    def ids() -> torch.Tensor:
        return torch.zeros(num_rows, dtype=torch.int64, device=device)

    logits = torch.zeros(num_rows, config.vocab_size, dtype=table.dtype, device=device)
    slots = {window: ids() for window in model.groups}
    outputs = torch.arange(num_rows, device=device)
    folds = None if model.fold is None else model.fold([model.padding] * num_rows)
    return Places(ids(), ids(), ids(), slots, folds, outputs, logits), tables


def _reason_of(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _mib(nbytes: int) -> str:
    return f"{nbytes / MIB:.0f} MiB"
