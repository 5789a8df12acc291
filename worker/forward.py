"""The seam between the engine and whatever computes tokens: a GPU, this CPU, or a timing model.

The engine decides which tokens run and where their KV lives; a `Forward` fills the blocks and draws
tokens. Torch-free: logits are opaque here.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol, Self, TypeAlias, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from mallee.protocol.hashing import Tokens
from mallee.protocol.messages import Grammar, Sampling, TokenLogprobs
from mallee.protocol.model import ModelSpec
from mallee.worker.kv.node import BlockCopy, BlockTable
from mallee.worker.kv.watch import KVMemory

Ids: TypeAlias = npt.NDArray[np.int64]
Words: TypeAlias = npt.NDArray[np.int32]
"""A set of tokens as bits: token t is in it if bit t % 32 of word t // 32 is set."""
Logits: TypeAlias = Any
"""Scores over the vocabulary for one next token; only a `Forward` looks inside."""

_ROOM = 32


# Which tokens a branch's text holds, for penalties: kept up to date token by token, never rescanned.


def distinct(tokens: Iterable[int]) -> Ids:
    """Each token once, rising."""
    return np.unique(np.fromiter(tokens, dtype=np.int64))


class TokenHistory:
    """A prompt's distinct tokens (shared by all branches of a job) and a branch's own, with counts."""

    __slots__ = ("_counts", "_ids", "_places", "_size", "prompt")

    def __init__(self, prompt: Ids) -> None:
        self.prompt = prompt
        self._places: dict[int, int] = {}
        self._ids = np.empty(_ROOM, dtype=np.int64)
        self._counts = np.zeros(_ROOM, dtype=np.float32)
        self._size = 0

    def add(self, token: int) -> None:
        """The branch drew `token`."""
        place = self._places.get(token)
        if place is None:
            place = self._places[token] = self._size
            self._size += 1
            if place == len(self._ids):
                self._ids = np.concatenate((self._ids, np.empty_like(self._ids)))
                self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
            self._ids[place] = token
        self._counts[place] += 1

    def after(self, tokens: Iterable[int]) -> "TokenHistory":
        """A copy, as if the branch had drawn `tokens` too."""
        copy = TokenHistory(self.prompt)
        copy._places, copy._size = dict(self._places), self._size
        copy._ids, copy._counts = self._ids.copy(), self._counts.copy()
        for token in tokens:
            copy.add(token)
        return copy

    @property
    def drawn(self) -> Ids:
        """The branch's own distinct tokens, in order of their first draw."""
        return self._ids[: self._size]

    @property
    def counts(self) -> npt.NDArray[np.float32]:
        """The number of times that each of `drawn` was drawn."""
        return self._counts[: self._size]

    def check(self) -> None:
        """Raise AssertionError on a broken invariant."""
        assert list(self._places) == self.drawn.tolist(), "places and ids disagree"
        assert (self.counts >= 1).all(), "a token in the history that was never drawn"
        assert (np.diff(self.prompt) > 0).all(), "the prompt's tokens are not distinct and rising"


# Grammars, which say what tokens may come next.
#
# A `Matcher` is the state of one text under one grammar. Branches share the matcher that they begin
# with: each takes a copy at its own first token (`Constraint`), so that a fork costs nothing.


def num_words(vocab_size: int) -> int:
    """Words of a set over a vocabulary."""
    return -(-vocab_size // 32)


def flags(words: Words, vocab_size: int) -> npt.NDArray[np.bool_]:
    """For each token whether it is in the set; of several sets, [..., words], for each of them."""
    raw = words.astype("<i4", copy=False).view(np.uint8)
    return np.unpackbits(raw, axis=-1, count=vocab_size, bitorder="little").view(np.bool_)


class Matcher(Protocol):
    """The state of one text in its grammar. One thread at a time."""

    @property
    def is_accepting(self) -> bool:
        """Whether the text may end here."""
        ...

    @property
    def is_stopped(self) -> bool:
        """Whether it has to: no further token can follow. Also if there is an `error`."""
        ...

    @property
    def error(self) -> str:
        """The reason that nothing can be told any more, "" if there is none: a refused token, a limit."""
        ...

    def advance(self, token: int) -> None:
        """`token` is the next of the text. What is wrong with that is in `error`."""
        ...

    def fork(self) -> Self:
        """The same state, to go on by itself."""
        ...


M = TypeVar("M", bound=Matcher)


class Structures(Protocol[M]):
    """Compiles grammars for one vocabulary."""

    def knows(self, grammar: Grammar) -> bool:
        """Whether `compile` would answer at once. Safe from any thread."""
        ...

    def compile(self, grammar: Grammar) -> M:
        """The state before the first token; shared by all who ask for the same grammar.

        Safe from any thread; what was compiled not long ago is there at once. Raises InvalidParameter.
        """
        ...

    def fill(self, matchers: Sequence[M], sets: Words) -> None:
        """Row i of `sets` [>= len(matchers), num_words] is what may follow matcher i.

        Ends of text are in it where the text may end. Matchers that fail say so by `error`. They must not
        be used elsewhere meanwhile; different calls may come from different threads.
        """
        ...

    def close(self) -> None:
        """End threads and processes; what is asked later begins new ones. Idempotent."""
        ...


class Constraint:
    """The grammar state of one branch: borrowed from its origin until the branch's first token."""

    __slots__ = ("_is_own", "matcher")

    def __init__(self, matcher: Matcher) -> None:
        self.matcher = matcher
        self._is_own = False

    def share(self) -> Matcher | None:
        """The state that a capsule keeps, now shared with it: that inside a text that can go on."""
        self._is_own = False
        return None if self.matcher.is_stopped else self.matcher

    def advance(self, token: int) -> None:
        """The branch drew `token`."""
        if not self._is_own:
            self.matcher = self.matcher.fork()
            self._is_own = True
        self.matcher.advance(token)


# Passes and draws.
#
# Each step makes a `Row` and a `Draw` for each of its branches: structs, as named tuples take three times as
# long to make.


class Row(msgspec.Struct, frozen=True):
    """One branch's share of a step: `tokens` at positions start, start + 1, ... of its sequence.

    `table` maps block index to block id and covers start + len(tokens) tokens. Slots before `start`
    are filled; the row's own slots are written by this pass, and no two rows write the same slot.
    """

    tokens: Tokens  # [n], n >= 1
    start: int
    table: BlockTable  # [>= ceil((start + n) / block_size)]
    num_logits: int  # logits are wanted after each of the last so many tokens; of none: 0
    sides: tuple[BlockTable, ...] = ()
    """By side group: of a window the same, true from the first block that the row reads on; of a state the
    slot that is read (`states.NO_STATE`: none yet) and the one that is written. Empty: as `table`."""


class ForwardBatch(NamedTuple):
    """The work of one engine step. Copies happen before any row is read or written."""

    copies: Sequence[BlockCopy]
    rows: Sequence[Row]


class Draw(msgspec.Struct, frozen=True):
    """One token to draw: from these logits, for the token at `position`, in stream `seed`.

    The result depends on the fields, the kind of device and nothing else: not on the row in the batch, not on
    what else is drawn. `sampling.seed` is ignored in favour of `seed`, `sampling.logprobs` by `sample` in
    favour of a call. `history` is needed for penalties alone. `allowed` (never empty): no other token may be
    drawn. `banned`: none of these (unless nothing is left then).
    """

    logits: Logits
    sampling: Sampling
    seed: int
    position: int
    history: TokenHistory | None = None
    allowed: Words | None = None
    banned: tuple[int, ...] = ()


class Drawing(Protocol):
    """Draws under way on a device."""

    def collect(self) -> list[int]:
        """The token of each draw. Waits for the draws, not for passes that were launched after them."""
        ...

    def logprobs(self) -> list[TokenLogprobs]:
        """The reports of the draws whose `sampling.logprobs` wants some. Waits as `collect` does."""
        ...


class LogprobQuery(NamedTuple):
    """One token to report on, with the `num_top` likeliest beside it."""

    logits: Logits
    token: int
    num_top: int


class Forward(Protocol):
    """Owns the KV memory of `num_blocks` blocks and computes over it. Called from one thread."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def block_size(self) -> int: ...

    @property
    def num_blocks(self) -> int: ...

    @property
    def memory(self) -> KVMemory:
        """The bytes of the blocks, for checks."""
        ...

    def forward(self, batch: ForwardBatch) -> Sequence[Logits]:
        """Fill the rows' KV; the Logits that rows want, in the order of rows and of positions.

        The result is valid until the next call; `keep` what must live longer.
        """
        ...

    def refold(self, rows: Sequence[Row], counts: Sequence[int]) -> None:
        """Write the state after the first `counts[i]` tokens of `rows[i]` to the slot that the row writes.

        `rows` are of the last pass, with several logits each, of which later tokens are refused. The pass
        kept what that takes: nothing but the states is computed again, and no weights are read. Of a model
        with states alone. Rejected: a slot for each drafted token (a state is large); computing the accepted
        tokens again in the next pass (the state would lag behind the text, and each fork and capture would
        need a pass first).
        """
        ...

    @property
    def row_nbytes(self) -> int:
        """Bytes that one row of kept logits takes, beside the blocks."""
        ...

    def keep(self, logits: Logits) -> Logits:
        """A copy of one row's logits that survives later calls and pins no batch memory."""
        ...

    def dump(self, logits: Logits) -> bytes:
        """Kept logits as bytes, for `undump` of a `Forward` of the same fingerprint.

        Raises DeviceMemoryExhausted, as `undump` does.
        """
        ...

    def undump(self, raw: bytes) -> Logits:
        """Kept logits again. Raises CodecError if they are none of this model, or no numbers."""
        ...

    def sample(self, draws: Sequence[Draw]) -> list[int]:
        """One token id per draw."""
        ...

    def logprobs(self, queries: Sequence[LogprobQuery]) -> list[TokenLogprobs]:
        """Log-probabilities of each query's token and likeliest, of the model's own distribution.

        That is before penalties, masks, temperature and filters. Equals by rising id.
        """
        ...


class DeviceForward(Forward, Protocol):
    """A `Forward` on a device that computes beside the host, in the order of the calls.

    `forward`, `forward_drawn`, `launch_draws` and `keep` only enqueue: they wait for nothing. Logits, which
    are numbers on the device, stay valid as long as they are held. All other calls wait, and so does each
    transfer of `memory`: it comes after what was enqueued before it, whatever thread it is called from.
    """

    def launch_draws(self, draws: Sequence[Draw]) -> Drawing:
        """Draw one token for each of `draws`, of which there are some."""
        ...

    def forward_drawn(
        self, batch: ForwardBatch, drawing: Drawing, draws: Sequence[int]
    ) -> Sequence[Logits]:
        """As `forward`. The token of row i is that of draw `draws[i]` of `drawing`, not its own."""
        ...
