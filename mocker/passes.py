"""The mocked pass: it takes time instead of computing, and draws tokens without logits."""

from collections.abc import Mapping, Sequence
from math import exp
from statistics import NormalDist
from typing import Final

import numpy as np

from mallee.mocker.run_length import RunLengthNotation, RunLengthTokens, answer_start, mixed
from mallee.mocker.timing import Timing
from mallee.protocol.messages import TokenLogprobs
from mallee.protocol.model import GroupSpec, ModelSpec
from mallee.worker.forward import Draw, ForwardBatch, Logits, LogprobQuery
from mallee.worker.forward import Row as BatchRow
from mallee.worker.kv.node import Node
from mallee.worker.kv.text import Text, TokenNotation
from mallee.worker.kv.watch import Row, Rows
from mallee.worker.sched.branch import Branch, answer_of, node_of
from mallee.worker.sched.plan import Chunk, Plan
from mallee.worker.updates import FrameSink, UpdateSink

_NORMAL: Final = NormalDist()
_SEEDLESS: Final = answer_start(0)


def mock_spec(
    *,
    vocab_size: int = 64,
    max_model_len: int = 1 << 20,
    eos_token_ids: tuple[int, ...] = (),
    groups: tuple[GroupSpec, ...] = (),
) -> ModelSpec:
    """The spec of a mocked model."""
    return ModelSpec(
        name="mock",
        fingerprint="mock",
        vocab_size=vocab_size,
        max_model_len=max_model_len,
        num_layers=1,
        num_kv_heads=1,
        head_dim=4,
        dtype_nbytes=1,
        eos_token_ids=eos_token_ids,
        groups=groups,
    )


def made_up_logprobs(vocab_size: int, token: int, num_top: int) -> TokenLogprobs:
    """Made up, but sound: `token` is the likeliest, the ids after it follow."""
    ids = [(token + i) % vocab_size for i in range(num_top)]
    return -0.5, tuple((top, -0.5 - i) for i, top in enumerate(ids))


class TimedForward:
    """A `Forward`, and the engine's `Passes`, over no memory at all. `step_s`: what the last one took.

    Draws are a function of (seed, position), or of the position alone if greedy: token ids, of
    `vocabulary` if given, or run-length tokens.
    """

    def __init__(
        self,
        spec: ModelSpec,
        timing: Timing,
        *,
        num_blocks: int,
        block_size: int,
        seed: int,
        vocabulary: Sequence[int] | None = None,
        notation: RunLengthNotation | None = None,
        updates: UpdateSink | None = None,
    ) -> None:
        self.spec = spec
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.row_nbytes = 0
        self.notation = notation or TokenNotation(spec.vocab_size)
        self.updates: UpdateSink = FrameSink() if updates is None else updates
        self._timing = timing
        self._seed = mixed(seed)
        self._vocabulary = vocabulary
        self._run_lengths = notation is not None
        self.slowdown = 1.0
        self.step_s = 0.0  # what the last plan took
        self.num_passes = 0
        self.decodes: Sequence[Branch] = ()  # of the last plan, without those that drew first in it
        self.chunks: Sequence[Chunk] = ()

    @property
    def memory(self) -> "TimedForward":
        return self

    @property
    def block_nbytes(self) -> int:
        return 0

    def new_rows(self, num: int) -> Rows:
        rows: Rows = np.empty((num, 0), np.uint8)
        return rows

    def mark(self) -> object:
        return None

    def read(self, blocks: Sequence[int], rows: Rows, after: object = None) -> None:
        """Do nothing: there is nothing to read."""

    def write(self, blocks: Sequence[int], rows: Rows, after: object = None) -> None:
        """Do nothing: there is nothing to write."""

    def are_numbers(self, blocks: Sequence[int], rows: Rows) -> bool:
        return True

    def clear(self, row: Row, num_slots: int, group: int = 0, part: int = 0) -> None:
        """Do nothing: there is nothing in it."""

    def fill(self, blocks: Sequence[int]) -> None:
        """Do nothing: there is nothing to fill."""

    def is_filled(self, block: int) -> bool:
        return True

    def digest(self, block: int, num_slots: int) -> int:
        return 0

    # Passes

    def run(self, plan: Plan) -> Sequence[Logits]:
        self.decodes, self.chunks = tuple(plan.decodes), plan.chunks
        self.step_s = 0.0
        # A drafted position is one more row, which reads what its branch's row reads.
        num_drafted = sum(len(draft.tokens) for draft in plan.drafts.values())
        if plan.decodes or plan.chunks or plan.ready:
            chunks = [(len(chunk.tokens), chunk.start) for chunk in plan.chunks]
            context = self.context(plan.decodes) if plan.decodes else 0
            self.step_s = self.pass_s(chunks, len(plan.decodes) + num_drafted, context)
        num_chunks = sum(chunk.num_logits for chunk in plan.chunks)
        return [None] * (len(plan.decodes) + num_drafted + num_chunks)

    def pass_s(self, chunks: Sequence[tuple[int, int]], rows: int, context: int) -> float:
        """Seconds of the next pass, with its jitter."""
        seconds = self._timing.step_s(chunks, rows, context) * self._factor(self.num_passes)
        self.num_passes += 1
        return seconds

    def accept(self, num_tokens: Mapping[Branch, int]) -> None:
        """Do nothing: no state was made."""

    def draw(self, branches: Sequence[Branch], num_steps: int) -> Sequence[Text]:
        """The next tokens of decodes, drawn in so many passes; no branch is changed.

        It takes no time: `Timing.multi_step_s` said what it takes before it began.
        """
        self.num_passes += num_steps
        drawn = self._drawn
        return [
            drawn(answer_of(branch).seed, branch.job.sampling.temperature, branch.length, num_steps)
            for branch in branches
        ]

    def steps_s(self, rows: int, context: int, num_steps: int) -> list[float]:
        """Seconds of each of the next decode steps, with its jitter."""
        step_s, factor, begun = self._timing.step_s, self._factor, self.num_passes
        return [step_s((), rows, context + i * rows) * factor(begun + i) for i in range(num_steps)]

    @property
    def has_jitter(self) -> bool:
        return self._timing.jitter > 0.0

    def context(self, decodes: Sequence[Branch]) -> int:
        """Tokens that a step reads for these rows; shared ones once, if the pass can do that."""
        if not self._timing.shares_reads or len(decodes) == 1:
            return sum(s.origin_len + len(s.tokens) for s in decodes)
        read: dict[Node, int] = {}
        for s in decodes:
            node: Node | None = node_of(s)
            end = s.length
            while node is not None:
                seen = read.get(node)
                own = end - node.base
                if seen is not None and seen >= own:
                    break
                read[node] = own
                end, node = node.base, node.parent
        return sum(read.values())

    # Draws

    def forward(self, batch: ForwardBatch) -> Sequence[Logits]:
        raise AssertionError("plans are timed, there are no batches")

    def refold(self, rows: Sequence[BatchRow], counts: Sequence[int]) -> None:
        raise AssertionError("plans are timed, there are no states")

    def keep(self, logits: Logits) -> Logits:
        return True  # not None: a capsule has them

    def dump(self, logits: Logits) -> bytes:
        return b""

    def undump(self, raw: bytes) -> Logits:
        return True

    def logprobs(self, queries: Sequence[LogprobQuery]) -> list[TokenLogprobs]:
        return [made_up_logprobs(self.spec.vocab_size, q.token, q.num_top) for q in queries]

    def sample(self, draws: Sequence[Draw]) -> list[int]:
        return [self._token(d.seed, d.sampling.temperature, d.position) for d in draws]

    def _factor(self, number: int) -> float:
        """The factor by which pass `number` is slower than the model's time: one draw a pass, of mean 1."""
        sigma = self._timing.jitter
        if not sigma:
            return self.slowdown
        # Of 52 bits: with more the greatest would be rounded up to 1, of which there is no inverse.
        share = ((mixed(self._seed ^ mixed(number)) >> 12) + 0.5) / (1 << 52)
        return self.slowdown * exp(sigma * _NORMAL.inv_cdf(share) - sigma * sigma / 2)

    def _drawn(self, seed: int, temperature: float, begin: int, num: int) -> Text:
        if self._run_lengths:
            return RunLengthTokens.of_run(self._token(seed, temperature, begin), num)
        return [self._token(seed, temperature, begin + i) for i in range(num)]

    def _token(self, seed: int, temperature: float, position: int) -> int:
        if temperature <= 0:
            seed = 0
        if self._run_lengths:
            return (answer_start(seed) if seed else _SEEDLESS) + position
        value = mixed(seed ^ mixed(position))
        if self._vocabulary is None:
            return value % self.spec.vocab_size
        return self._vocabulary[value % len(self._vocabulary)]
