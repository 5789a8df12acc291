"""Capsules as files, in tests: records that fit a tiny model, blocks of numbers, and a lender of them."""

import secrets
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from mallee.gateway.capsules.files.exports import Exports
from mallee.gateway.capsules.files.imports import Imports, SpoolLender
from mallee.gateway.capsules.files.record import num_rows
from mallee.gateway.capsules.files.spool import Spools
from mallee.protocol.codec import encode
from mallee.protocol.errors import UnknownCapsule
from mallee.protocol.events import pack_hashes
from mallee.protocol.messages import Continuation, Grammar, Holder, Limits, Sampling, pack_tokens
from mallee.protocol.model import GroupSpec, ModelSpec
from mallee.worker.capsules.record import CapsuleRecord
from mallee.worker.kv.watch import Rows
from mallee.worker.transfer.values import Ask, Lender

BLOCK_SIZE = 4
FIELDS = (("dtype", "float32"), ("rope", "1e4"), ("tokenizer", "abc"), ("weights", "w1"))


def spec(*, window: int | None = None, **changed: Any) -> ModelSpec:
    """A model of two layers; with a `window` two more that read so many tokens."""
    full = GroupSpec(kind="full", layers=(0, 1), nbytes=128)
    groups: tuple[GroupSpec, ...] = ()
    if window is not None:
        of_window = GroupSpec(kind="window", layers=(2, 3, 4), nbytes=192, window=window)
        groups = (full, of_window)
    given: dict[str, Any] = {
        "name": "m",
        "fingerprint": "f",
        "vocab_size": 32,
        "max_model_len": 64,
        "num_layers": 2,
        "num_kv_heads": 1,
        "head_dim": 8,
        "dtype_nbytes": 4,
        "eos_token_ids": (2,),
        "groups": groups,
        "kv_fields": FIELDS,
    }
    return ModelSpec(**{**given, **changed})


SPEC = spec()


def record(model: ModelSpec = SPEC, *, num: int = 11, **changed: Any) -> CapsuleRecord:
    """A capsule of `num` tokens in a tenant's scope, the last of which is not computed yet."""
    blocks, _ = num_rows(model, BLOCK_SIZE, num - 1)
    given: dict[str, Any] = {
        "capsule": "req_secret.0",
        "tokens": pack_tokens([i % 30 for i in range(num)]),
        "num_computed": num - 1,
        "salt": f"{model.identity}/5c09e",
        "fingerprint": model.identity,
        "block_size": BLOCK_SIZE,
        "keys": pack_hashes(np.arange(7000, 7000 + blocks, dtype=np.uint64)),
        "has_tail": bool((num - 1) % BLOCK_SIZE),
        "logits": None,
        "ttl_s": 77.0,
        "continuation": Continuation(
            Sampling(0.5, seed=3, logit_bias=((4, 1.0),)), Limits(20, (5,)), 1, min(3, num - 1)
        ),
        "grammar": Grammar("regex", "a+", min(2, num)),
    }
    return CapsuleRecord(**{**given, **changed})


def rows(model: ModelSpec = SPEC, *, num: int = 11) -> list[bytes]:
    """The blocks of `record`, and its rows of windows."""
    size = model.block_nbytes(BLOCK_SIZE) // 4
    total = sum(num_rows(model, BLOCK_SIZE, num - 1))
    return [np.full(size, i - 2.5, np.float32).tobytes() for i in range(total)]


class HeldLoan:
    """A loan of `blocks`."""

    def __init__(self, lender: "Shelf", record: bytes, blocks: Sequence[bytes]) -> None:
        self.record = record
        self.num_blocks = len(blocks)
        self.block_nbytes = len(blocks[0]) if blocks else lender.block_nbytes
        self._lender = lender
        self._blocks = blocks
        self.is_closed = False

    def read(self, places: Sequence[int], rows: Rows) -> None:
        assert not self.is_closed
        assert list(places) == sorted(places)
        self._lender.num_read += len(places)
        for place, row in zip(places, rows, strict=True):
            row[:] = np.frombuffer(self._blocks[place], np.uint8)

    def close(self) -> None:
        self.is_closed = True


class Shelf:
    """A lender of capsules that a test puts there."""

    def __init__(self, model: ModelSpec = SPEC) -> None:
        self.block_nbytes = model.block_nbytes(BLOCK_SIZE)
        self.capsules: dict[str, tuple[bytes, list[bytes]]] = {}
        self.loans: list[HeldLoan] = []
        self.num_read = 0

    def put(self, name: str, kept: CapsuleRecord, blocks: list[bytes]) -> Holder:
        self.capsules[name] = encode(kept), blocks
        return Holder("w0", 1, "unix:/x", 0, name)

    def lend(self, ask: Ask) -> HeldLoan:
        if ask.holder.capsule not in self.capsules:
            raise UnknownCapsule(ask.holder.capsule)
        loan = HeldLoan(self, *self.capsules[ask.holder.capsule])
        self.loans.append(loan)
        return loan


async def _address() -> str:
    return "unix:/spools"


class Desk:
    """Exports from a `Shelf` or another lender, and imports."""

    def __init__(
        self,
        folder: Path,
        *,
        model: ModelSpec = SPEC,
        max_spool_nbytes: int = 1 << 20,
        lender: Lender | None = None,
    ) -> None:
        self.model = model
        self.shelf = Shelf(model)
        self.pool = ThreadPoolExecutor(2)
        self.exports = Exports(lender or self.shelf, self.pool, most=2)
        self.spools = Spools(folder, max_spool_nbytes, most=2)
        self.lender = SpoolLender(lambda: secrets.token_hex(8))
        self.imports = Imports(
            "g0",
            self.spools,
            self.pool,
            max_nbytes=max_spool_nbytes,
            lender=self.lender,
            address=_address,
        )

    async def sent(self, holder: Holder, model: ModelSpec | None = None) -> bytes:
        """The whole file of a capsule."""
        export = await self.exports.begin(holder, model or self.model, BLOCK_SIZE)
        try:
            data = b"".join([piece async for piece in export.pieces()])
        finally:
            export.close()
        assert len(data) == export.nbytes
        return data
