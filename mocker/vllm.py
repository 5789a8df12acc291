"""An engine that follows vLLM's rules, for replays: its scheduler and its block pool, under a timing.

Source: vLLM 0.32.0, `v1/core/sched/scheduler.py` (fcfs, chunked prefill, `scheduler_reserve_full_isl`) and
`v1/core/block_pool.py`, for layers of full attention, without async scheduling.

    step        those that run come first, in order; then those that wait, while the token budget lasts
    admission   the whole text must fit beside the watermark; then blocks are taken chunk by chunk
    no block    the last that runs is preempted: it waits in front, and computes its text again
    cache       full blocks by chained hash, once a step is planned; the last token is always computed
    eviction    free blocks from the head of a queue: unhashed ones come in at the head, hashed ones at
                the tail, the end of a text before its beginning

It has no capsules: a fork is requests for the texts of its branches, and finds what the cache still has.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from math import inf
from operator import itemgetter
from typing import Final, cast

import numpy as np

from mallee.mocker.engine import Outcome
from mallee.mocker.passes import TimedForward, mock_spec
from mallee.mocker.run_length import RunLengthTokens, answer_start
from mallee.mocker.texts import Texts
from mallee.mocker.timing import Timing
from mallee.mocker.updates import CountedUpdate, WireError
from mallee.protocol.errors import ConfigError, KVMemoryExceeded
from mallee.protocol.events import EventBatch, Removed, Snapshot, Stored, pack_hashes
from mallee.protocol.ids import Incarnation, RequestId, WorkerId, capsule_id
from mallee.protocol.messages import Cancel, Command, FinishReason, Fork, Generate, Prefill, Release
from mallee.worker.sched.policy import SchedulerConfig

_ANSWER: Final = answer_start(0)  # of greedy draws, as our mocked engines draw them


class BlockPool:
    """Blocks, those without a reader in the order in which they are taken again, and what is in them."""

    def __init__(self, num_blocks: int) -> None:
        self.free = OrderedDict.fromkeys(range(num_blocks))
        self.cached: dict[int, dict[int, None]] = {}  # blocks by hash: equal texts may have copies
        self.changes: list[tuple[type[Stored | Removed], int]] = []  # since they were published
        self.num_evicted = 0
        self._readers = [0] * num_blocks
        self._hashes: list[int | None] = [None] * num_blocks

    def find(self, hashes: Sequence[int]) -> tuple[list[int], int]:
        """The blocks of the leading hashes that are cached; so many of them are free."""
        found: list[int] = []
        for each in hashes:
            if (copies := self.cached.get(each)) is None:
                break
            found.append(next(iter(copies)))
        return found, sum(not self._readers[block] for block in found)

    def read(self, blocks: Iterable[int]) -> None:
        """Add a reader to each."""
        for block in blocks:
            if not self._readers[block]:
                del self.free[block]
            self._readers[block] += 1

    def take(self, num: int) -> list[int]:
        """Free blocks; what was in them is gone."""
        taken = [self.free.popitem(last=False)[0] for _ in range(num)]
        for block in taken:
            self._readers[block] = 1
            if (known := self._hashes[block]) is not None:
                self._hashes[block] = None
                self.num_evicted += 1
                del self.cached[known][block]
                if not self.cached[known]:
                    del self.cached[known]
                    self.changes.append((Removed, known))
        return taken

    def cache(self, block: int, known: int) -> None:
        """Make a full block known by its hash."""
        self._hashes[block] = known
        copies = self.cached.setdefault(known, {})
        if not copies:
            self.changes.append((Stored, known))
        copies[block] = None

    def release(self, blocks: Iterable[int]) -> None:
        """End a reader of each, the first to be taken again first."""
        unhashed = []
        for block in blocks:
            self._readers[block] -= 1
            if not self._readers[block]:
                self.free[block] = None
                if self._hashes[block] is None:
                    unhashed.append(block)
        for block in reversed(unhashed):
            self.free.move_to_end(block, last=False)

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Raises AssertionError unless the readers are those of `tables`."""
        readers = [0] * len(self._readers)
        for table in tables:
            for block in table:
                readers[block] += 1
        assert readers == self._readers, "readers"
        assert self.free.keys() == {b for b, num in enumerate(readers) if not num}, "free blocks"


@dataclass(eq=False, slots=True)
class VllmRequest:
    """One text that grows. `capsule` names it when it is whole, if it is to be forked."""

    name: str
    branch: int
    text: RunLengthTokens
    max_tokens: int
    capsule: str
    hashes: list[int]  # of full blocks
    num_prompt: int
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_hashed: int = 0  # blocks that others find
    num_output: int = 0
    num_reported: int = 0  # of its output
    cached: int = -1  # tokens of its prompt; -1: never admitted
    last_s: float = -inf  # of its last token


class VllmEngine:
    """To be driven as a `MockedEngine`, a step at a time. Texts are those of `texts`."""

    def __init__(
        self,
        *,
        timing: Timing,
        texts: Texts,
        num_blocks: int,
        worker: WorkerId,
        incarnation: Incarnation,
        config: SchedulerConfig,
        seed: int = 0,
        leaves_capsules: bool = False,
    ) -> None:
        self.pool = BlockPool(num_blocks)
        self.num_preemptions = self.next_seq = 0
        self.next_due = inf
        self.max_model_len = num_blocks * texts.block_size
        self.spec = mock_spec(vocab_size=1 << 32, max_model_len=self.max_model_len)
        self._texts, self._size = texts, texts.block_size
        self._config, self._watermark = config, int(config.watermark * num_blocks)
        self._forward = TimedForward(
            self.spec, timing, num_blocks=num_blocks, block_size=self._size, seed=seed
        )
        self._overhead_s = timing.overhead_s / timing.speedup
        self._life = worker, incarnation
        self._leaves_capsules = leaves_capsules
        self._capsules: dict[str, RunLengthTokens] = {}
        self._waiting: deque[VllmRequest] = deque()
        self._running: list[VllmRequest] = []
        self._planned: list[tuple[VllmRequest, int]] = []  # and its tokens of this step
        self._updates: list[CountedUpdate] = []
        self._begun = self._end = self._before = 0.0  # and the end of the step before

    @property
    def num_evicted(self) -> int:
        return self.pool.num_evicted

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting or self._updates)

    @property
    def host_s(self) -> float:
        return min(self._end - self._begun, self._overhead_s)

    def slow(self, factor: float) -> None:
        self._forward.slowdown = factor

    # Commands

    def submit(self, command: Command, gateway: str = "g") -> None:
        match command:
            case Generate():
                for branch in range(command.n):
                    self._add(command, branch, self._read(command.tokens))
            case Prefill():
                self._add(command, 0, self._read(command.tokens), command.capsule)
            case Fork():
                for branch, suffix in enumerate(command.suffixes):
                    text = self._capsules[command.capsule][:]
                    if suffix:
                        text.extend(self._read(suffix))
                    self._add(command, branch, text)
            case Cancel():
                for each in [*self._running, *self._waiting]:
                    if each.name == command.request and command.branch in (None, each.branch):
                        self._leave(each, "cancelled")
            case Release():
                self._capsules.pop(command.capsule, None)
            case _:
                raise ConfigError(f"{type(command).__name__}: vLLM's rules have no such command")

    def _read(self, raw: bytes) -> RunLengthTokens:
        return cast("RunLengthTokens", self._texts.notation.read(raw))

    def _add(
        self, command: Generate | Fork | Prefill, branch: int, text: RunLengthTokens, to: str = ""
    ) -> None:
        request = VllmRequest(
            name=command.request,
            branch=branch,
            text=text,
            max_tokens=0 if isinstance(command, Prefill) else command.limits.max_tokens,
            capsule=to or str(capsule_id(RequestId(command.request), branch)),
            hashes=self._texts.hashes_of(text),
            num_prompt=len(text),
        )
        self._waiting.append(request)
        needed, most = -(-(len(text) + request.max_tokens) // self._size), self.max_model_len
        if needed * self._size > most:
            error = KVMemoryExceeded(needed, most // self._size, self._size)
            self._leave(request, "error", error.to_wire())

    # Steps

    def start(self, now: float) -> float | None:
        self._plan()
        if not self._planned and not self._updates:
            assert not self._waiting, "one that runs alone has room"
            return None
        chunks, rows, context, self._begun, self._end = [], 0, 0, now, now
        for request, num in self._planned:
            if num == 1 and request.num_computed:  # one token is a decode, whatever it is of
                rows, context = rows + 1, context + request.num_computed + 1
            else:
                chunks.append((num, request.num_computed))
        if self._planned:
            self._end += self._forward.pass_s(chunks, rows, context)
        return self._end

    def _plan(self) -> None:
        budget, free, at, is_preempted = self._config.max_step_tokens, self.pool.free, 0, False
        while at < len(self._running) and budget:
            request = self._running[at]
            num = min(len(request.text) - request.num_computed, budget)
            while self._missing(request, request.num_computed + num) > len(free):
                is_preempted = True
                victim = self._running.pop()
                self._give_way(victim)
                if victim is request:
                    return
            budget -= self._extend(request, num)
            at += 1
        while self._waiting and budget and not is_preempted:
            request, most = self._waiting[0], self._config.max_rows
            found, num_free = self.pool.find(
                request.hashes[: (len(request.text) - 1) // self._size]
            )
            margin = self._watermark if self._running else 0
            whole = self._missing(request, len(request.text)) - len(found) + num_free + margin
            if len(self._running) >= most or whole > len(free):
                return
            self._running.append(self._waiting.popleft())
            self.pool.read(found)
            request.blocks, request.num_hashed = found, len(found)
            request.num_computed = len(found) * self._size
            if request.cached < 0:
                request.cached = request.num_computed
            budget -= self._extend(request, min(len(request.text) - request.num_computed, budget))

    def _missing(self, request: VllmRequest, num_tokens: int) -> int:
        """Blocks that so many tokens of its text need beyond those that it has."""
        return max(0, -(-num_tokens // self._size) - len(request.blocks))

    def _extend(self, request: VllmRequest, num: int) -> int:
        """Plan its next `num` tokens; others find what they fill from now on."""
        end = request.num_computed + num
        request.blocks += self.pool.take(self._missing(request, end))
        for i in range(request.num_hashed, end // self._size):
            self.pool.cache(request.blocks[i], request.hashes[i])
        request.num_hashed = end // self._size
        self._planned.append((request, num))
        return num

    def _give_way(self, request: VllmRequest) -> None:
        self._release(request)
        self.num_preemptions += 1
        self._waiting.appendleft(request)

    def _release(self, request: VllmRequest) -> None:
        self.pool.release(reversed(request.blocks))
        request.blocks, request.num_computed, request.num_hashed = [], 0, 0

    def cut(self, now: float) -> float:
        return self._end

    def delay(self, end: float) -> None:
        self._end = end

    def finish(self) -> Outcome:
        num_gaps, late_s, end = 0, [], self._end
        for request, num in self._planned:
            request.num_computed += num
            if request.num_computed == len(request.text):
                if request.last_s == self._before:
                    num_gaps += 1
                elif request.num_output:
                    late_s.append(end - request.last_s)
                request.last_s = end
                self._draw(request)
        self._planned, self._before = [], end
        updates, self._updates = self._updates, []
        return Outcome(
            begun=self._begun,
            ended=end,
            num_steps=1,
            num_gaps=num_gaps,
            late_s=late_s,
            updates=updates,
            events=self._events(),
        )

    def _draw(self, request: VllmRequest) -> None:
        if request.max_tokens:
            request.text.append(_ANSWER + len(request.text))
            request.num_output += 1
            if not len(request.text) % self._size:
                block = request.text[-self._size :]
                request.hashes += self._texts.hashes_of(block, parent=request.hashes)
        if request.num_output >= request.max_tokens:
            self._leave(request, "length" if request.max_tokens else "stop")
        elif request.num_output == 1:
            self._update(request)

    def _leave(
        self, request: VllmRequest, finish: FinishReason, error: WireError | None = None
    ) -> None:
        """End a request; a text that was computed may be forked."""
        self._release(request)
        (self._running if request in self._running else self._waiting).remove(request)
        if self._leaves_capsules and finish in ("length", "stop"):
            self._capsules[request.capsule] = request.text
        self._update(request, finish, error)

    def _update(
        self,
        request: VllmRequest,
        finish: FinishReason | None = None,
        error: WireError | None = None,
    ) -> None:
        is_left = finish is not None and request.capsule in self._capsules
        cached, num_reported = max(0, request.cached), request.num_reported
        request.num_reported = request.num_output
        self._updates.append(
            CountedUpdate(
                request=request.name,
                branch=request.branch,
                num_tokens=request.num_output - num_reported,
                finish=finish,
                cached_tokens=cached,
                prefill_tokens=request.num_prompt - cached,
                capsule=request.capsule if is_left else None,
                boundary=len(request.text) if is_left else 0,
                error=error,
            )
        )

    # Reading

    def _events(self) -> EventBatch | None:
        changes, self.pool.changes = self.pool.changes, []
        if not changes:
            return None
        found = [
            kind(pack_hashes(np.array([known for _, known in same], np.uint64)))
            for kind, same in groupby(changes, key=itemgetter(0))
        ]
        batch = EventBatch(*self._life, self.next_seq, tuple(found))
        self.next_seq = batch.next_seq
        return batch

    def unreported(self, now: float) -> list[CountedUpdate]:
        self._updates = []
        for request in (*self._running, *self._waiting):
            if request.num_output > request.num_reported:
                self._update(request)
        return self._updates

    def snapshot(self) -> Snapshot:
        hashes = pack_hashes(np.array(list(self.pool.cached), np.uint64))
        return Snapshot(*self._life, self.next_seq, hashes, ())

    def close(self) -> None:
        """Do nothing: it holds nothing outside."""

    def check(self) -> None:
        self.pool.check(request.blocks for request in (*self._running, *self._waiting))
