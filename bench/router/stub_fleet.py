"""Workers in virtual time: a block cache and a clock, no tokens. For benches of the router alone.

A stub does what a Mallee worker does to time and cache: it runs at most `max_rows` rows, computes prompts
in chunks beside its decoding rows, computes a prefix once for all that wait for it, keeps blocks until
it needs their room, and says so in events. Deterministic.
"""

import heapq
import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from bench.router.stub_cache import BlockCache, Blocks
from mallee.protocol.events import (
    CapsuleStored,
    Event,
    EventBatch,
    Lease,
    Removed,
    Stored,
    pack_hashes,
)


class Timing(NamedTuple):
    """Llama 3.1 8B, bf16, vLLM on one H200: a fit to `aiconfigurator_static_vllm.csv.gz` (h200_sxm, tp 1).

    Prefill of 4,096 tokens: 92.8 ms; behind 16,384 others: 145 ms. A decode step: 4.8 ms for one row,
    9.1 ms for 256 with 128 tokens each, 23.5 ms with 2,048 each (128 blocks each, none shared).
    """

    prefill_token_s: float = 2.2e-5
    prefill_context_s: float = 7.8e-10  # per token and token before it
    step_base_s: float = 4.8e-3
    step_row_s: float = 1.3e-5
    step_block_s: float = 4.6e-7  # per active block; a shared one is read once
    step_tokens: int = 8192  # prompt tokens computed in one step, at most
    pull_latency_s: float = 2e-3
    pull_block_s: float = (2 << 20) / 25e9  # 2 MiB a block over 25 GB/s

    def per_block(self, block_size: int) -> "Timing":
        """The same for blocks of another size: what is given here is for 16 tokens."""
        times = block_size / 16
        return self._replace(
            step_block_s=self.step_block_s * times, pull_block_s=self.pull_block_s * times
        )


class Simulation:
    """Virtual time: calls in the order of their times, equal ones in the order they were asked for."""

    def __init__(self) -> None:
        self.now = 0.0
        self._calls: list[tuple[float, int, Callable[[], None]]] = []
        self._next = 0

    def at(self, time: float, call: Callable[[], None]) -> None:
        self._next += 1
        heapq.heappush(self._calls, (max(time, self.now), self._next, call))

    def run(self) -> None:
        """Until nothing is left to happen."""
        while self._calls:
            self.now, _, call = heapq.heappop(self._calls)
            call()

    def run_until(self, time: float) -> None:
        """What happens until then has happened, and it is that time now."""
        while self._calls and self._calls[0][0] <= time:
            self.now, _, call = heapq.heappop(self._calls)
            call()
        self.now = time


@dataclass(slots=True, eq=False)
class Task:
    """A request on one worker: rows with a common prompt of full blocks, each with more of its own."""

    request: str
    blocks: Blocks
    more_tokens: Sequence[int]  # per row, after the blocks
    output_tokens: Sequence[int]  # per row; 0: only compute the prompt
    is_fork: bool = False  # the blocks are there: nothing of them is computed
    pull: bool = False  # the blocks are fetched, not computed
    keeps_capsule: bool = False
    cached_tokens: int = 0  # of the first row's prompt, when it began
    on_first: Callable[[int], None] = lambda row: None
    on_end: Callable[[int], None] = lambda row: None


@dataclass(slots=True, eq=False)
class _Row:
    task: Task
    index: int
    prompt_tokens: int
    own_blocks: int
    done: int = 0  # tokens of the prompt computed or found
    is_computing: bool = False


@dataclass(slots=True)
class _Chunk:
    row: _Row
    tokens: int


@dataclass(slots=True)
class Work:
    """What a fleet computed."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    pulled_blocks: int = 0
    by_block: Counter[int] = field(default_factory=Counter)  # how often each was computed


class StubWorker:
    """One worker; `publish` gets its events, `work` is shared by a fleet."""

    def __init__(
        self,
        simulation: Simulation,
        name: str,
        *,
        timing: Timing,
        work: Work,
        publish: Callable[[EventBatch], None],
        num_blocks: int,
        max_rows: int,
        block_size: int = 16,
    ) -> None:
        self.name = name
        self.timing = timing
        self.num_running = 0
        self.max_rows = max_rows
        self._sim = simulation
        self._work = work
        self._publish = publish
        self._size = block_size
        self._waiting: deque[_Row] = deque()
        self._prefilling: list[_Row] = []
        self._decoding: list[tuple[int, int, _Row]] = []  # heap by the step that ends the row
        self._cache = BlockCache(num_blocks)
        self._computing: dict[int, _Row] = {}
        self._own_blocks = 0
        self._pulled: dict[Blocks, float] = {}  # when they are here
        self._events: list[Event] = []
        self._seq = 0
        self._num_steps = self._num_rows = self._version = 0
        self._chunks: list[_Chunk] = []
        self._begun = self._step_s = 0.0
        self._steps = 0  # under way; 0: idle

    def lease(self) -> Lease:
        """What it is."""
        return Lease(
            worker=self.name,
            incarnation=1,
            address=self.name,
            model="stub",
            fingerprint="stub",
            block_size=self._size,
            num_blocks=self._cache.num_blocks,
            max_rows=self.max_rows,
            max_model_len=1 << 20,
            next_seq=0,
        )

    @property
    def num_cached(self) -> int:
        """Blocks that are computed and here."""
        return self._cache.num_sealed

    def submit(self, task: Task) -> None:
        """Its rows wait for their turn."""
        if task.pull and task.blocks not in self._pulled:
            pull_s = self.timing.pull_latency_s + len(task.blocks) * self.timing.pull_block_s
            self._pulled[task.blocks] = self._sim.now + pull_s
            self._sim.at(self._sim.now + pull_s, lambda: self._arrive(task.blocks))
        shared = len(task.blocks) * self._size
        for index, (more, out) in enumerate(zip(task.more_tokens, task.output_tokens, strict=True)):
            own = -(-(more + out) // self._size)
            self._waiting.append(_Row(task, index, shared + more, own))
        self._interrupt()

    def _arrive(self, blocks: Blocks) -> None:
        fresh = [block for block in blocks if block not in self._cache]
        self._work.pulled_blocks += len(fresh)
        self._seal(fresh)
        self._tell()
        self._interrupt()

    # Steps

    def _interrupt(self) -> None:
        """Something new is here: begin, or end a run of decode steps at the next one."""
        if not self._steps:
            self._begin()
        elif not self._chunks and self._steps > 1:
            passed = max(1, math.ceil((self._sim.now - self._begun) / self._step_s - 1e-9))
            if passed < self._steps:
                self._schedule(passed)

    def _schedule(self, steps: int) -> None:
        self._steps = steps
        self._version += 1
        version = self._version
        end = self._begun + steps * self._step_s
        self._sim.at(end, lambda: self._end(version))

    def _begin(self) -> None:
        self._admit()
        self._chunks = self._plan()
        if not self._chunks and not self._decoding:
            return  # idle, or waiting for a pull
        t = self.timing
        prefill_s = sum(
            c.tokens * (t.prefill_token_s + t.prefill_context_s * (c.row.done + c.tokens / 2))
            for c in self._chunks
        )
        active = self._cache.num_used + self._own_blocks
        self._step_s = (
            max(t.step_base_s, prefill_s)
            + t.step_row_s * len(self._decoding)
            + t.step_block_s * active
        )
        self._begun = self._sim.now
        ends_in = self._decoding[0][0] - self._num_steps if self._decoding else 1
        self._schedule(1 if self._chunks else max(1, ends_in))

    def _end(self, version: int) -> None:
        if version != self._version:
            return
        self._num_steps += self._steps
        self._steps = 0
        for chunk in self._chunks:
            self._compute(chunk)
        self._chunks = []
        while self._decoding and self._decoding[0][0] <= self._num_steps:
            self._finish(heapq.heappop(self._decoding)[2])
        self._tell()
        self._begin()

    def _admit(self) -> None:
        while self._waiting and self.num_running < self.max_rows:
            row = self._waiting[0]
            blocks = row.task.blocks
            needed = self._own_blocks + row.own_blocks + self._cache.num_used_with(blocks)
            if self.num_running and needed > self._cache.num_blocks:
                return
            self._waiting.popleft()
            self.num_running += 1
            self._own_blocks += row.own_blocks
            self._cache.use(blocks)
            removed = self._cache.make_room(self._own_blocks)
            if removed:
                self._events.append(Removed(pack_hashes(removed)))
            if row.task.is_fork:
                row.done = len(blocks) * self._size
            self._attach(row)
            if row.index == 0:
                row.task.cached_tokens = min(row.done, row.prompt_tokens - 1)
            self._prefilling.append(row)

    def _plan(self) -> list[_Chunk]:
        chunks = []
        budget = self.timing.step_tokens - len(self._decoding)
        for row in self._prefilling:
            if budget <= 0:
                break
            self._attach(row)
            blocks, at = row.task.blocks, row.done // self._size
            if at < len(blocks):
                if row.task.pull and self._pulled[row.task.blocks] > self._sim.now:
                    continue
                if self._computing.setdefault(blocks[at], row) is not row:
                    continue  # a sibling computes it
                for block in blocks[at:]:
                    self._computing.setdefault(block, row)
            # The last token's logits are always computed, unless a capsule holds them.
            left = row.prompt_tokens - row.done
            tokens = min(budget, left if row.task.is_fork else max(1, left))
            chunks.append(_Chunk(row, tokens))
            budget -= tokens
        return chunks

    def _attach(self, row: _Row) -> None:
        """`row` goes on behind the blocks that are here by now."""
        blocks, size = row.task.blocks, self._size
        if row.done % size or row.task.is_fork:
            return
        at = before = row.done // size
        while at < len(blocks) and blocks[at] in self._cache:
            at += 1
        row.done = at * size
        self._work.cached_tokens += (at - before) * size

    def _compute(self, chunk: _Chunk) -> None:
        row, size = chunk.row, self._size
        before, row.done = row.done, min(row.done + chunk.tokens, row.prompt_tokens)
        self._work.prompt_tokens += chunk.tokens
        blocks = row.task.blocks[before // size : row.done // size]
        for block in blocks:
            self._computing.pop(block, None)
        self._work.by_block.update(blocks)
        self._seal([block for block in blocks if block not in self._cache])
        if row.done == row.prompt_tokens:
            self._prefilling.remove(row)
            self._start(row)

    def _start(self, row: _Row) -> None:
        task, output = row.task, row.task.output_tokens[row.index]
        if task.keeps_capsule:
            self._cache.use(task.blocks)
            run = pack_hashes(task.blocks)
            boundary = len(task.blocks) * self._size + task.more_tokens[row.index]
            self._events.append(CapsuleStored(f"{task.request}.{row.index}", boundary, run))
        if output:
            task.on_first(row.index)
        if output > 1:
            self._num_rows += 1
            end = self._num_steps + output - 1
            heapq.heappush(self._decoding, (end, self._num_rows, row))
        else:
            self._finish(row)

    def _finish(self, row: _Row) -> None:
        self.num_running -= 1
        self._own_blocks -= row.own_blocks
        self._cache.leave(row.task.blocks)
        row.task.on_end(row.index)

    def _seal(self, blocks: Sequence[int]) -> None:
        if blocks:
            self._cache.seal(blocks)
            self._events.append(Stored(pack_hashes(blocks)))

    def check(self) -> None:
        """Raises AssertionError unless nothing is left of requests that are over."""
        self._cache.check()
        if not self.num_running:
            left = (self._own_blocks, self._prefilling, self._decoding, self._computing)
            assert not any(left), f"{self.name} has {left} left"

    def _tell(self) -> None:
        if self._events:
            batch = EventBatch(self.name, 1, self._seq, tuple(self._events))
            self._seq = batch.next_seq
            self._events = []
            self._publish(batch)
