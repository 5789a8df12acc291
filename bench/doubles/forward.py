"""A forward pass over content instead of numbers: a row's tokens depend on all it can read.

Each KV slot holds a fingerprint of (token, position). The "logits" of a row are a digest of every slot
of its sequence, read through its block table, so a wrong table, a lost copy or an overwritten block
changes the tokens: the same discipline as a real model, at the cost of a hash. `linear_tokens` is the
oracle: what one undisturbed sequence draws.
"""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from mallee.mocker.passes import made_up_logprobs
from mallee.protocol.errors import CodecError
from mallee.protocol.hashing import Tokens, as_tokens
from mallee.protocol.messages import Sampling, TokenLogprobs
from mallee.protocol.model import ModelSpec
from mallee.worker.forward import Draw, ForwardBatch, Logits, LogprobQuery, flags
from mallee.worker.forward import Row as BatchRow
from mallee.worker.kv.watch import Row, Rows

_POISON = np.uint64(0xDEAD_BEEF_DEAD_BEEF)


class MockForward:
    """A `Forward` whose KV is one fingerprint a slot. Counts what it computes."""

    def __init__(
        self, spec: ModelSpec, *, num_blocks: int, block_size: int = 16, row_nbytes: int = 0
    ) -> None:
        self.spec = spec
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.row_nbytes = row_nbytes
        self.kv: npt.NDArray[np.uint64] = np.full((num_blocks, block_size), _POISON, np.uint64)
        self.num_tokens = 0
        self.num_passes = 0

    @property
    def memory(self) -> "MockForward":
        return self

    @property
    def block_nbytes(self) -> int:
        return int(self.kv[0].nbytes)

    def new_rows(self, num: int) -> Rows:
        return np.zeros((num, self.block_nbytes), np.uint8)

    def mark(self) -> object:
        return None

    def read(self, blocks: Sequence[int], rows: Rows, after: object = None) -> None:
        for block, row in zip(blocks, rows, strict=True):
            row.view(np.uint64)[:] = self.kv[block]

    def write(self, blocks: Sequence[int], rows: Rows, after: object = None) -> None:
        for block, row in zip(blocks, rows, strict=True):
            self.kv[block] = row.view(np.uint64)

    def are_numbers(self, blocks: Sequence[int], rows: Rows) -> bool:
        return True

    def clear(self, row: Row, num_slots: int, group: int = 0, part: int = 0) -> None:
        row.view(np.uint64)[num_slots:] = 0

    def fill(self, blocks: Sequence[int]) -> None:
        self.kv[np.asarray(blocks)] = _POISON

    def is_filled(self, block: int) -> bool:
        return bool((self.kv[block] == _POISON).all())

    def digest(self, block: int, num_slots: int) -> int:
        return _digest(self.kv[block, :num_slots])

    def forward(self, batch: ForwardBatch) -> Sequence[Logits]:
        for copy in batch.copies:
            self.kv[copy.dst] = _POISON
            self.kv[copy.dst, : copy.num_slots] = self.kv[copy.src, : copy.num_slots]
        for row in batch.rows:
            positions = np.arange(row.start, row.start + len(row.tokens))
            blocks = row.table[positions // self.block_size]
            self.kv[blocks, positions % self.block_size] = _slots(row.tokens, row.start)
            self.num_tokens += len(row.tokens)
        self.num_passes += 1
        return [
            _digest(self.kv[row.table].reshape(-1)[:end])
            for row in batch.rows
            for end in _ends(row)
        ]

    def refold(self, rows: Sequence[BatchRow], counts: Sequence[int]) -> None:
        raise AssertionError("no layer is recurrent")

    def keep(self, logits: Logits) -> Logits:
        return logits

    def dump(self, logits: Logits) -> bytes:
        return int(logits).to_bytes(8, "little")

    def undump(self, raw: bytes) -> Logits:
        if len(raw) != 8:
            raise CodecError(f"logits of {len(raw)} bytes; 8 are a row", nbytes=len(raw))
        return int.from_bytes(raw, "little")

    def logprobs(self, queries: Sequence[LogprobQuery]) -> list[TokenLogprobs]:
        return [made_up_logprobs(self.spec.vocab_size, q.token, q.num_top) for q in queries]

    def sample(self, draws: Sequence[Draw]) -> list[int]:
        return [draw_token(self.spec.vocab_size, draw) for draw in draws]


def draw_token(vocab_size: int, draw: Draw) -> int:
    """The token for `draw`: a function of the digest, and of (seed, position) unless greedy.

    Of what may be drawn, if a grammar or a ban says so; other ways of sampling change nothing.
    """
    key: tuple[int, ...] = (draw.logits,)
    if draw.sampling.temperature > 0:
        key = (draw.logits, draw.seed, draw.position)
    value = xxhash.xxh3_64_intdigest(np.array(key, dtype=np.uint64).tobytes())
    if draw.allowed is None and not draw.banned:
        return value % vocab_size
    ids = np.arange(vocab_size)
    if draw.allowed is not None:
        ids = ids[flags(draw.allowed, vocab_size)]
    left = ids[~np.isin(ids, draw.banned)]
    choice = left if len(left) else ids
    return int(choice[value % len(choice)])


def digest_of(tokens: Sequence[int]) -> int:
    """The "logits" after `tokens`."""
    return _digest(_slots(as_tokens(tokens), 0))


def linear_tokens(
    spec: ModelSpec,
    prompt: Sequence[int],
    n: int,
    *,
    sampling: Sampling,
    seed: int,
    logits_after: Callable[[Sequence[int]], int] = digest_of,
) -> list[int]:
    """The n tokens that one sequence draws after `prompt`, computed from the tokens alone."""
    tokens = list(prompt)
    for _ in range(n):
        logits = logits_after(tokens)
        tokens.append(draw_token(spec.vocab_size, Draw(logits, sampling, seed, len(tokens))))
    return tokens[len(prompt) :]


def _ends(row: BatchRow) -> range:
    """Tokens of the sequence up to each position whose logits are wanted."""
    end = row.start + len(row.tokens)
    return range(end - row.num_logits + 1, end + 1)


def _slots(tokens: Tokens, start: int) -> npt.NDArray[np.uint64]:
    positions = np.arange(start, start + len(tokens), dtype=np.uint64)
    return (positions << np.uint64(32)) | tokens.astype(np.uint64)


def _digest(slots: npt.NDArray[np.uint64]) -> int:
    return xxhash.xxh3_64_intdigest(np.ascontiguousarray(slots).tobytes())
