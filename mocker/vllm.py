"""An engine that follows vLLM's rules, for replays: its scheduler, its block pool, under a timing.

Source: vLLM 0.32.0, `v1/core/sched/scheduler.py` (policy fcfs, chunked prefill, `scheduler_reserve_full_isl`),
`v1/core/block_pool.py` and `single_type_kv_cache_manager.py` (full attention), without async scheduling.

    step        those that run come first, in order; then those that wait, while the token budget lasts
    admission   the whole text must fit beside the watermark; then blocks are taken chunk by chunk
    no block    the last that runs is preempted: it waits in front, and computes its text again
    cache       full blocks by chained hash, once a step is planned; the last token is always computed
    eviction    free blocks from the head of a queue: unhashed ones come in at the head, hashed ones at
                the tail, the end of a text before its beginning

It has no capsules: a fork is requests for the texts of its branches, and finds what the cache still has.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
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
        self.num_blocks = num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._readers = [0] * num_blocks
        self._hashes: list[int | None] = [None] * num_blocks
        self._cached: dict[int, dict[int, None]] = {}  # blocks by hash: equal texts may have copies
        self.changes: list[tuple[type[Stored | Removed], int]] = []  # since they were published
        self.num_evicted = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    def find(self, hashes: Sequence[int]) -> list[int]:
        """The blocks of the leading hashes that are cached."""
        found = []
        for each in hashes:
            copies = self._cached.get(each)
            if copies is None:
                break
            found.append(next(iter(copies)))
        return found

    def num_taken_by(self, blocks: Iterable[int]) -> int:
        """Free blocks that new readers of `blocks` take away."""
        return sum(not self._readers[block] for block in blocks)

    def read(self, blocks: Iterable[int]) -> None:
        """Add a reader to each."""
        for block in blocks:
            if not self._readers[block]:
                del self._free[block]
            self._readers[block] += 1

    def take(self, num: int) -> list[int]:
        """Blocks with nothing in them; `num_free` are there."""
        taken = [self._free.popitem(last=False)[0] for _ in range(num)]
        for block in taken:
            self._readers[block] = 1
            if (known := self._hashes[block]) is not None:
                self._hashes[block] = None
                self.num_evicted += 1
                copies = self._cached[known]
                del copies[block]
                if not copies:
                    del self._cached[known]
                    self.changes.append((Removed, known))
        return taken

    def cache(self, block: int, known: int) -> None:
        """Make a full block known by its hash."""
        self._hashes[block] = known
        copies = self._cached.setdefault(known, {})
        if not copies:
            self.changes.append((Stored, known))
        copies[block] = None

    def free(self, blocks: Iterable[int]) -> None:
        """End a reader of each, the first to be taken again first."""
        unhashed = []
        for block in blocks:
            self._readers[block] -= 1
            if not self._readers[block]:
                self._free[block] = None
                if self._hashes[block] is None:
                    unhashed.append(block)
        for block in reversed(unhashed):
            self._free.move_to_end(block, last=False)

    def held(self) -> list[int]:
        """The hashes of all that is cached."""
        return list(self._cached)

    def check(self, tables: Sequence[Sequence[int]]) -> None:
        """Raises AssertionError unless the readers are those of `tables`."""
        readers = [0] * self.num_blocks
        for table in tables:
            for block in table:
                readers[block] += 1
        assert readers == self._readers, "readers"
        assert self._free.keys() == {b for b, num in enumerate(readers) if not num}, "free blocks"


class VllmRequest:
    """One text that grows. `capsule` names it when it is whole, if it is to be forked."""

    __slots__ = (
        *("blocks", "branch", "cached", "capsule", "hashes", "last_s", "max_tokens", "name"),
        *("num_computed", "num_hashed", "num_output", "num_prompt", "text"),
    )

    def __init__(self, name: str, branch: int, text: RunLengthTokens, max_tokens: int) -> None:
        self.name = name
        self.branch = branch
        self.text = text
        self.num_prompt = len(text)
        self.max_tokens = max_tokens
        self.capsule = str(capsule_id(RequestId(name), branch))
        self.hashes: list[int] = []  # of full blocks
        self.blocks: list[int] = []
        self.num_computed = self.num_hashed = self.num_output = 0
        self.cached = -1  # tokens of its prompt; -1: never admitted
        self.last_s = -inf  # its last token


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
        self.spec = mock_spec(vocab_size=1 << 32, max_model_len=num_blocks * texts.block_size)
        self.pool = BlockPool(num_blocks)
        self.num_preemptions = 0
        self.next_due = inf
        self._texts, self._config, self._timing = texts, config, timing
        self._size = texts.block_size
        self._forward = TimedForward(
            self.spec, timing, num_blocks=num_blocks, block_size=self._size, seed=seed
        )
        self._worker, self._incarnation = worker, incarnation
        self._watermark = int(config.watermark * num_blocks)
        self._leaves_capsules = leaves_capsules
        self._capsules: dict[str, RunLengthTokens] = {}
        self._waiting: deque[VllmRequest] = deque()
        self._running: list[VllmRequest] = []
        self._planned: list[tuple[VllmRequest, int]] = []  # and its tokens of this step
        self._updates: list[CountedUpdate] = []
        self._begun = self._end = self._ended = 0.0
        self._next_seq = 0

    @property
    def is_busy(self) -> bool:
        return bool(self._planned)

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting or self._updates)

    @property
    def max_model_len(self) -> int:
        return self.spec.max_model_len

    @property
    def num_evicted(self) -> int:
        return self.pool.num_evicted

    @property
    def host_s(self) -> float:
        return min(self._end - self._begun, self._timing.overhead_s / self._timing.speedup)

    @property
    def next_seq(self) -> int:
        return self._next_seq

    def slow(self, factor: float) -> None:
        self._forward.slowdown = factor

    # Commands

    def submit(self, command: Command, gateway: str = "g") -> None:
        """Take a command. While it is not busy."""
        assert not self.is_busy, "commands wait until the step is over"
        read = self._texts.notation.read
        match command:
            case Generate():
                for branch in range(command.n):
                    text = cast("RunLengthTokens", read(command.tokens))
                    self._add(command.request, branch, text, command.limits.max_tokens)
            case Prefill():
                text = cast("RunLengthTokens", read(command.tokens))
                self._add(command.request, 0, text, 0, command.capsule)
            case Fork():
                for branch, suffix in enumerate(command.suffixes):
                    text = self._capsules[command.capsule][:]
                    if suffix:
                        text.extend(read(suffix))
                    self._add(command.request, branch, text, command.limits.max_tokens)
            case Cancel():
                for each in [*self._running, *self._waiting]:
                    if each.name == command.request and command.branch in (None, each.branch):
                        self._leave(each, "cancelled")
            case Release():
                self._capsules.pop(command.capsule, None)
            case _:
                raise ConfigError(f"{type(command).__name__}: vLLM's rules have no such command")

    def _add(
        self, name: str, branch: int, text: RunLengthTokens, max_tokens: int, capsule: str = ""
    ) -> None:
        request = VllmRequest(name, branch, text, max_tokens)
        request.capsule = capsule or request.capsule
        known = self._texts.notation.hashes(text, self._size, salt=self._texts.salt)
        request.hashes = known.tolist()
        self._waiting.append(request)
        needed = -(-(len(text) + max_tokens) // self._size)
        if needed > self.pool.num_blocks:
            error = KVMemoryExceeded(needed, self.pool.num_blocks, self._size)
            self._leave(request, "error", error.to_wire())

    # Steps

    def start(self, now: float) -> float | None:
        """Begin the next step: when it will be over. None: there is nothing to do."""
        assert not self._planned, "it computes already"
        self._begun = now
        self._plan()
        if not self._planned and not self._updates:
            assert not self._waiting, "one that runs alone has room"
            return None
        chunks, rows, context = [], 0, 0
        for request, num in self._planned:
            if num == 1 and request.num_computed:  # one token is a decode, whatever it is of
                rows, context = rows + 1, context + request.num_computed + 1
            else:
                chunks.append((num, request.num_computed))
        self._end = now + (self._forward.pass_s(chunks, rows, context) if self._planned else 0.0)
        return self._end

    def _plan(self) -> None:
        budget, planned = self._config.max_step_tokens, self._planned
        is_preempted, i = False, 0
        while i < len(self._running) and budget:
            request = self._running[i]
            num = min(len(request.text) - request.num_computed, budget)
            while (missing := self._missing(request, num)) > self.pool.num_free:
                is_preempted = True
                victim = self._running.pop()
                self._preempt(victim)
                if victim is request:
                    break
            else:
                self._extend(request, num, missing)
                budget -= num
                i += 1
        while (
            self._waiting and budget and not is_preempted
            and len(self._running) < self._config.max_rows
        ):  # fmt: skip
            request = self._waiting[0]
            most = (len(request.text) - 1) // self._size  # to draw, one token is computed
            found = self.pool.find(request.hashes[:most])
            whole = -(-len(request.text) // self._size) - len(found)
            margin = self._watermark if self._running else 0
            if whole + self.pool.num_taken_by(found) + margin > self.pool.num_free:
                break
            self._running.append(self._waiting.popleft())
            self.pool.read(found)
            request.blocks = found
            request.num_computed = len(found) * self._size
            request.num_hashed = len(found)
            if request.cached < 0:
                request.cached = request.num_computed
            num = min(len(request.text) - request.num_computed, budget)
            self._extend(request, num, self._missing(request, num))
            budget -= num

    def _missing(self, request: VllmRequest, num: int) -> int:
        """Blocks that its next `num` tokens need beyond those that it has."""
        return max(0, -(-(request.num_computed + num) // self._size) - len(request.blocks))

    def _extend(self, request: VllmRequest, num: int, num_blocks: int) -> None:
        """Plan `num` tokens; what they fill is found by others from now on."""
        request.blocks += self.pool.take(num_blocks)
        for i in range(request.num_hashed, (request.num_computed + num) // self._size):
            self.pool.cache(request.blocks[i], request.hashes[i])
            request.num_hashed = i + 1
        self._planned.append((request, num))

    def _preempt(self, request: VllmRequest) -> None:
        self._release(request)
        self.num_preemptions += 1
        self._waiting.appendleft(request)

    def _release(self, request: VllmRequest) -> None:
        self.pool.free(reversed(request.blocks))
        request.blocks = []
        request.num_computed = request.num_hashed = 0

    def cut(self, now: float) -> float:
        return self._end

    def delay(self, end: float) -> None:
        """The step under way ends at `end`: until then its device also worked for others."""
        self._end = end

    def finish(self) -> Outcome:
        """The end of what `start` began, at its time."""
        num_gaps, late_s = 0, []
        for request, num in self._planned:
            request.num_computed += num
            if request.num_computed < len(request.text):
                continue
            if request.last_s == self._ended:
                num_gaps += 1
            elif request.last_s > -inf:
                late_s.append(self._end - request.last_s)
            request.last_s = self._end
            self._draw(request)
        self._planned, self._ended = [], self._end
        updates, self._updates = self._updates, []
        return Outcome(
            begun=self._begun,
            ended=self._end,
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
                parent = request.hashes[-1] if request.hashes else None
                block = request.text[-self._size :]
                salt = self._texts.salt
                request.hashes += self._texts.notation.hashes(
                    block, self._size, salt=salt, parent=parent
                ).tolist()
        if request.num_output >= request.max_tokens:
            self._leave(request, "length" if request.max_tokens else "stop")
        elif request.num_output == 1:
            self._update(request, 1, None)

    def _leave(
        self, request: VllmRequest, finish: FinishReason, error: WireError | None = None
    ) -> None:
        """End a request; a text that was computed may be forked."""
        self._release(request)
        (self._running if request in self._running else self._waiting).remove(request)
        if self._leaves_capsules and finish in ("length", "stop"):
            self._capsules[request.capsule] = request.text
        told = request.num_output if request.num_output < 2 else request.num_output - 1
        self._update(request, told, finish, error)

    def _update(
        self,
        request: VllmRequest,
        num_tokens: int,
        finish: FinishReason | None,
        error: WireError | None = None,
    ) -> None:
        is_left = finish is not None and request.capsule in self._capsules
        self._updates.append(
            CountedUpdate(
                request=request.name,
                branch=request.branch,
                num_tokens=num_tokens,
                finish=finish,
                cached_tokens=max(0, request.cached),
                prefill_tokens=request.num_prompt - max(0, request.cached),
                capsule=request.capsule if is_left else None,
                boundary=len(request.text) if is_left else 0,
                error=error,
            )
        )

    def _events(self) -> EventBatch | None:
        changes, self.pool.changes = self.pool.changes, []
        if not changes:
            return None
        found = [
            kind(pack_hashes(np.array([known for _, known in same], np.uint64)))
            for kind, same in groupby(changes, key=itemgetter(0))
        ]
        batch = EventBatch(self._worker, self._incarnation, self._next_seq, tuple(found))
        self._next_seq = batch.next_seq
        return batch

    # Reading

    def unreported(self, now: float) -> list[CountedUpdate]:
        """Tokens drawn by `now` that were not reported: for a crash."""
        self._updates = []
        for request in (*self._running, *self._waiting):
            if request.num_output > 1:
                self._update(request, request.num_output - 1, None)
        return self._updates

    def snapshot(self) -> Snapshot:
        """All that is cached, as of the events published so far. Between steps."""
        hashes = pack_hashes(np.array(self.pool.held(), np.uint64))
        return Snapshot(self._worker, self._incarnation, self._next_seq, hashes, ())

    def close(self) -> None:
        """Nothing is held outside."""

    def check(self) -> None:
        """Raises AssertionError on a broken invariant. Between steps."""
        self.pool.check([request.blocks for request in (*self._running, *self._waiting)])
