"""Ways of serving a search, and a client that plays searches on one mocked engine in virtual time.

    resent   plain requests with the whole text; nothing is cached: every branch is prefilled again
    cached   the same requests, blocks found by their hashes: siblings that come together wait for one
             prefill, which is more than most block caches do
    forks    a command forks the capsule that an answer left; rows read what they share row by row, as above
    tree     the same, and what rows share is read once

Tree, pool and scheduler are the engine's own. A search whose capsule was evicted sends the text again.
"""

import hashlib
import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Final, NamedTuple

import numpy as np

from bench.engine.timing import VirtualClock
from bench.search.programs import VOCABULARY, Expand, Program, Shape, Text, drawn_text
from mallee.mocker.engine import MockedEngine
from mallee.mocker.passes import mock_spec
from mallee.mocker.timing import Timing
from mallee.protocol.errors import UnknownCapsule
from mallee.protocol.ids import Incarnation, WorkerId
from mallee.protocol.messages import (
    Command,
    Fork,
    Generate,
    Limits,
    Sampling,
    Update,
)
from mallee.worker.engine import Engine
from mallee.worker.kv.node import Node
from mallee.worker.records import EngineConfig
from mallee.worker.sched.policy import SchedulerConfig

BLOCK_SIZE: Final = 16
MAX_MODEL_LEN: Final = 1 << 17


class Way(NamedTuple):
    """Switches of the engine, and whether clients fork."""

    forks: bool = False
    prefix_cache: bool = True
    shares_reads: bool = False

    def config(self, kept: int) -> EngineConfig:
        return EngineConfig(
            SchedulerConfig(max_step_tokens=8192, gang=self.shares_reads),
            max_answer_capsules=kept if self.forks else 0,
            prefix_cache=self.prefix_cache,
        )


WAYS: Final = {
    "resent": Way(prefix_cache=False),
    "cached": Way(),
    "forks": Way(forks=True),
    "tree": Way(forks=True, shares_reads=True),
}


class Setting(NamedTuple):
    """All that a run depends on beside shape, way and seed. `searches` run at once, with own prompts."""

    timing: Timing
    kv_tokens: int
    prompt: int = 2048
    searches: int = 1
    kept: int = 1024  # capsules of answers that an engine keeps, at most


class Run(NamedTuple):
    """Seconds, tokens and blocks of a run. Peaks: blocks that running branches read; all but mere cache."""

    total_s: float
    ttft_s: tuple[float, ...]  # of answers, from their request on, by the time of their first token
    drawn: int
    prefilled: int
    peak_blocks: int
    held_blocks: int
    resent: int  # expansions whose capsule was gone
    preemptions: int
    answers: str  # a digest for each search


@dataclass(slots=True)
class _Answer:
    """One answer as far as it has come, and the capsule that it left."""

    tokens: list[int] = field(default_factory=list)
    capsule: str = ""


@dataclass(slots=True, eq=False)
class _Search:
    """One search: its program, and the round that is under way."""

    program: Program
    seed: int
    expands: Sequence[Expand] = ()
    answers: list[list[_Answer]] = field(default_factory=list)
    left: int = 0  # answers that have not ended
    digest: "hashlib._Hash" = field(default_factory=hashlib.sha256)


class _Place(NamedTuple):
    """An expansion that a request belongs to, and the first of its answers that is the request's."""

    search: _Search
    expansion: int
    first: int


class Client:
    """Plays searches until all are over. A request reaches the engine `request_s` after it was sent."""

    def __init__(self, way: Way, setting: Setting, seed: int) -> None:
        self.way = way
        self.clock = VirtualClock()
        self.request_s = setting.timing.request_s
        self.mocked = MockedEngine(
            timing=replace(setting.timing, shares_reads=way.shares_reads),
            num_blocks=setting.kv_tokens // BLOCK_SIZE,
            block_size=BLOCK_SIZE,
            worker=WorkerId("w0"),
            incarnation=Incarnation(0),
            clock=self.clock,
            config=way.config(setting.kept * setting.searches),
            spec=mock_spec(vocab_size=VOCABULARY, max_model_len=MAX_MODEL_LEN),
            seed=seed,
        )
        self._seed = seed
        self._names: Iterator[int] = count()
        self._arrivals: list[tuple[float, int, Command]] = []
        self._arrived: list[Command] = []
        self._places: dict[str, _Place] = {}
        self._gone: set[str] = set()  # requests whose capsule was evicted
        self._sent: dict[str, float] = {}
        self._ttft: dict[tuple[str, int], float] = {}
        self._num_resent = self._peak = self._drawn = 0

    def play(self, shape: Shape, setting: Setting) -> Run:
        """Searches of this shape, which begin together."""
        searches = []
        for number in range(setting.searches):
            seed = 1000 * self._seed + number
            root = Text(drawn_text(seed, setting.prompt))
            search = _Search(shape.begin(root, seed), seed)
            searches.append(search)
            self._ask(search, next(search.program))
        self._run()
        engine = self.mocked.engine
        stats = engine.stats()
        return Run(
            total_s=self.clock.now,
            ttft_s=tuple(self._ttft.values()),
            drawn=self._drawn,
            prefilled=stats.num_prefill_tokens,
            peak_blocks=self._peak,
            held_blocks=engine.usage().live_blocks,
            resent=self._num_resent,
            preemptions=stats.sched.num_preemptions,
            answers=" ".join(search.digest.hexdigest()[:16] for search in searches),
        )

    # Time

    def _run(self) -> None:
        """Steps and arrivals, by their times; a command at the end of a step is there for the next."""
        mocked, clock = self.mocked, self.clock
        end = None
        while self._arrivals or end is not None:
            due = self._arrivals[0][0] if self._arrivals else float("inf")
            if end is None or due <= end:
                clock.now = due
                self._arrived.append(heapq.heappop(self._arrivals)[2])
                if end is not None:
                    end = mocked.cut(due)
            else:
                clock.now = end
                frames = mocked.finish_raw().frames
                self._peak = max(self._peak, running_blocks(mocked.engine))
                for frame in frames.values():
                    for update in frame.updates:
                        self._note(update)
                end = None
            if end is None and not (self._arrivals and self._arrivals[0][0] <= clock.now):
                for command in self._arrived:
                    mocked.submit(command)
                self._arrived.clear()
                end = mocked.start(clock.now)
                self._peak = max(self._peak, running_blocks(mocked.engine))
        assert not mocked.has_work, "it waits for what never comes"

    def _send(self, command: Generate | Fork) -> None:
        self._sent[command.request] = self.clock.now
        arrival = (self.clock.now + self.request_s, next(self._names), command)
        heapq.heappush(self._arrivals, arrival)

    # Searches

    def _ask(self, search: _Search, expands: Sequence[Expand]) -> None:
        """A round of requests."""
        search.expands = expands
        search.answers = [[_Answer() for _ in range(each.width)] for each in expands]
        search.left = sum(each.width for each in expands)
        for number, expand in enumerate(expands):
            if not expand.text.capsule:
                self._resend(search, number)
                continue
            name = f"f{next(self._names)}"
            self._places[name] = _Place(search, number, 0)
            suffixes = (expand.suffix.tobytes(),) * expand.width
            limits, sampling = self._draws(search, number)
            self._send(Fork(name, expand.text.capsule, suffixes, limits, sampling))

    def _resend(self, search: _Search, number: int) -> None:
        """The whole text: once where `n` answers are a fork, else for each answer."""
        expand = search.expands[number]
        raw = expand.text.tokens.tobytes() + expand.suffix.tobytes()
        limits, sampling = self._draws(search, number)
        n = expand.width if self.way.forks else 1
        for first in range(0, expand.width, n):
            name = f"g{next(self._names)}"
            self._places[name] = _Place(search, number, first)
            self._send(Generate(name, raw, limits, sampling, n=n, first_branch=first))

    def _draws(self, search: _Search, number: int) -> tuple[Limits, Sampling]:
        """Equal texts draw equal answers, however they are asked for."""
        expand = search.expands[number]
        seed = 1 + (search.seed << 20) + (len(expand.text.tokens) << 8) + number
        return Limits(expand.tokens, ignore_eos=True), Sampling(1.0, seed=seed)

    def _found(self, search: _Search) -> list[list[Text]]:
        """The texts that the answers of a round lead to."""
        found = []
        for expand, answers in zip(search.expands, search.answers, strict=True):
            before = (expand.text.tokens, expand.suffix)
            texts = []
            for answer in answers:
                tokens = np.array(answer.tokens, np.uint32)
                search.digest.update(tokens.tobytes())
                texts.append(Text(np.concatenate([*before, tokens]), answer.capsule))
            found.append(texts)
        return found

    def _note(self, update: Update) -> None:
        if update.request in self._gone:
            return
        search, number, first = self._places[update.request]
        if update.error is not None:
            if update.error[0] != UnknownCapsule.code:
                raise RuntimeError(f"{update.request} failed: {update.error}")
            self._gone.add(update.request)
            self._num_resent += 1
            self._resend(search, number)
            return
        answer = search.answers[number][first + update.branch]
        if update.tokens:
            self._drawn += len(update.tokens)
            key = (update.request, update.branch)
            self._ttft.setdefault(key, self.clock.now - self._sent[update.request])
            answer.tokens.extend(update.tokens)
        if update.finish is not None:
            answer.capsule = update.capsule or ""
            search.left -= 1
            if not search.left:
                self._end_round(search)

    def _end_round(self, search: _Search) -> None:
        try:
            expands = search.program.send(self._found(search))
        except StopIteration:
            return
        self._ask(search, expands)


def running_blocks(engine: Engine) -> int:
    """Blocks that running branches read, shared ones once."""
    seen: set[Node] = set()
    total = 0
    for branch in engine.branches:
        node: Node | None = branch.node
        while node is not None and node not in seen:
            seen.add(node)
            total += len(node.blocks)
            node = node.parent
    return total


def play(shape: Shape, way: str, setting: Setting, seed: int) -> Run:
    """One run."""
    return Client(WAYS[way], setting, seed).play(shape, setting)
