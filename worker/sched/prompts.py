"""What a step computes of prompts, and who is admitted for it.

In the order of the policy, in chunks, as far as the step's tokens and rows go. A prompt that does not
fit in the pool holds up those behind it: whoever overtakes it would take its room again and again. One
whose next block is under way for another branch waits for that. Under the fair policy short prompts get
up to a quarter of a step before long ones that have no better claim.
"""

from typing import NamedTuple

from mallee.worker.kv.tree import BranchTree
from mallee.worker.sched.branch import Chunk, FairQueue, Phase, Sequence
from mallee.worker.sched.policy import Policy, SchedulerConfig
from mallee.worker.sched.running import BlockBudget, Running
from mallee.worker.sched.sessions import Sessions
from mallee.worker.sched.waiting import Waiting


class Queues(NamedTuple):
    """What a plan is made of."""

    sessions: Sessions
    waiting: Waiting
    running: Running
    room: BlockBudget


class Prompts:
    """Moves branches from `waiting` to `running`. `tokens` and `rows` are what is left of the step."""

    def __init__(
        self,
        config: SchedulerConfig,
        policy: Policy,
        tree: BranchTree,
        queues: Queues,
    ) -> None:
        self._config = config
        self._policy = policy
        self._tree = tree
        self._sessions, self._waiting, self._running, self._room = queues
        waiting, running = queues.waiting, queues.running
        self._lines = (running.short, running.long, waiting.short, waiting.long)
        self.turn_tokens = max(1, config.max_step_tokens // 8)  # of one, where turns are taken
        self.tokens = self.rows = 0
        self.may_admit = True
        self._step = 0
        self._chunks = 0  # left
        self._is_full = False  # of prompts that can't be cut
        self._granted: dict[Sequence, int] = {}
        self._num_preempted = 0  # as far as was seen to

    def begin(self, step: int) -> None:
        """Nothing of `step` is planned yet."""
        self.tokens = self._config.max_step_tokens
        self.rows = self._config.max_rows
        self.may_admit = self._config.continuous or self._running.num == 0
        self._step = step
        self._chunks = self._config.max_chunks or self.rows
        self._is_full = False
        self._granted = {}
        self._num_preempted = self._room.num_preemptions

    def fill(self, but: int = 0) -> None:
        """Use up what is left of the step, but for so many rows of one token."""
        num = self._waiting.num_to_compute + self._running.num_wanting
        if num < 2 and not but:  # nobody to choose between
            if num and (only := self.head()) is not None:
                self.grant(only, self.tokens)
            return
        # Some may have aged here too.
        kept = min(but, max(1, self.rows - 1), max(1, self.tokens // 2))
        self.tokens -= kept
        self.rows -= kept
        self.serve_aged()
        if self._policy.is_fair:
            self._fill_short()
        while (head := self.head()) is not None:
            self.grant(head, self.tokens)
        self.tokens += kept
        self.rows += kept

    def _fill_short(self) -> None:
        """Short prompts overtake long ones, but take no more than a quarter of a step."""
        running, waiting = self._running, self._waiting
        if not (running.short.num or waiting.short.num):
            return
        if not (running.long.num or waiting.long.num):
            return
        least = self.tokens - max(1, self._config.max_step_tokens // 4)
        while self.tokens > max(0, least):
            short = self._first(self._running.short, self._waiting.short)
            long = self._first(self._running.long, self._waiting.long)
            if short is None or long is None or self._order(short)[:3] > self._order(long)[:3]:
                return
            before = self._waiting.long.first()
            is_behind = before is not None and self._order(before) < self._order(short)
            if before is not None and is_behind and not self._room.has_room(before):
                return  # or it would never have any
            self.grant(short, self.tokens - max(0, least))

    def serve_aged(self) -> None:
        """Whoever has gone unserved for too long gets a part of the step."""
        for line in self._lines:
            while line.num and self.tokens > 0 and (aged := self.most_aged(line)) is not None:
                if not self._can_grant(aged):
                    break
                is_cut = self._config.chunked
                self.grant(aged, min(self.turn_tokens, self.tokens) if is_cut else self.tokens)

    def _can_grant(self, sequence: Sequence) -> bool:
        if self._is_full or (sequence.phase is Phase.WAITING and not self.may_admit):
            return False
        return sequence in self._granted or (self.rows > 0 and self._chunks > 0)

    def head(self) -> Sequence | None:
        """The prompt that is to be computed next, of those that run or may be admitted."""
        return self._first(*self._lines) if self.tokens > 0 else None

    def _first(self, *lines: FairQueue) -> Sequence | None:
        """The same, of some lines."""
        best: Sequence | None = None
        for line in lines:
            if not line.num:
                continue
            first = line.first()
            if first is None or not self._can_grant(first):
                continue
            if best is None or self._order(first) < self._order(best):
                best = first
        return best

    def _order(self, sequence: Sequence) -> tuple[float, int, float, int]:
        session = sequence.payer
        return (self._sessions.level(session), session.number, sequence.rank, sequence.ticket)

    def grant(self, sequence: Sequence, limit: int) -> None:
        """Plan up to `limit` more tokens of `sequence`, if it can be admitted and has room."""
        if sequence.phase is Phase.WAITING and not self._try_admit(sequence):
            return
        have = self._granted.get(sequence, 0)
        pending = sequence.num_pending
        n = min(pending - have, limit)
        if n < pending and not self._config.chunked:
            self._is_full = True  # it runs whole or not at all
            return
        has_room = self._room.grow(sequence, have + n)
        self.drop_preempted()
        if not has_room:
            return
        if not have:
            self.rows -= 1
            self._chunks -= 1
        self._granted[sequence] = have + n
        self.tokens -= n
        self._sessions.charge(sequence.payer, n)
        assert sequence.line is not None, "it wants no more"
        sequence.line.serve(sequence, self._step)
        if have + n == pending:
            sequence.line.remove(sequence)

    def _try_admit(self, sequence: Sequence) -> bool:
        if self._waiting.gate(sequence):
            return False
        has_room = self._room.make_room(sequence) or self._room.make_way(sequence)
        self.drop_preempted()
        if not has_room:
            self.may_admit = False  # nobody overtakes it
            return False
        self.admit(sequence)
        return True

    def drop_preempted(self) -> None:
        """Who was preempted in this step computes nothing in it, and nobody else joins."""
        if self._room.num_preemptions > self._num_preempted:
            self._num_preempted = self._room.num_preemptions
            self.may_admit = False
            self._granted = {s: n for s, n in self._granted.items() if s.phase is Phase.PREFILL}

    def admit(self, sequence: Sequence) -> None:
        self._waiting.remove(sequence)
        tree, size = self._tree, self._tree.block_size
        hashes = self._waiting.hashes(sequence) if sequence.logits is None else sequence.hashes
        origin = sequence.origin
        if origin is not None and tree.find(hashes) * size <= origin.end:
            sequence.node = origin
            tree.hold(origin)
        else:
            sequence.node = tree.attach(hashes, sequence.salt)
        if sequence.num_admissions == 0:
            sequence.attached_tokens = sequence.node.end
        self._waiting.gates.depart(hashes[sequence.node.end // size :], sequence)
        self._running.admit(sequence, self._step)
        self._room.admitted(sequence)

    # Ageing

    def is_aged(self, sequence: Sequence) -> bool:
        """Whether `sequence` is served now, so that all like it are served within `ageing_steps`."""
        bound = self._config.ageing_steps
        if not bound:
            return False
        ahead = (self._running.num + self._waiting.num) // self._config.max_rows
        return self._step - sequence.last_step >= max(1, bound - 2 - ahead)

    @property
    def have_aged(self) -> bool:
        """Whether any has."""
        return any(self.most_aged(line) is not None for line in self._lines)

    def most_aged(self, line: FairQueue) -> Sequence | None:
        oldest = line.oldest()
        return oldest if oldest is not None and self.is_aged(oldest) else None

    def chunks(self) -> list[Chunk]:
        chunks: list[Chunk] = []
        if not self._granted:
            return chunks
        granted = [s for s in self._granted if s not in self._room.failed]
        if len(granted) > 1:
            granted.sort(key=_place)
        for sequence in granted:
            assert sequence.node is not None
            n = self._granted[sequence]
            is_last = n == sequence.num_pending
            chunks.append(Chunk(sequence, sequence.pending(n), sequence.node.end, is_last))
        return chunks


def _place(sequence: Sequence) -> tuple[bytes, int]:
    return sequence.place
