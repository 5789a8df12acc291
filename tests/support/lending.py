"""Engines of one process that lend to each other, in one thread."""

from collections.abc import Callable, Sequence

from mallee.protocol.errors import MalleeError, WorkerLost
from mallee.protocol.messages import Holder
from mallee.worker.capsules.record import CapsuleRecord, decode_record
from mallee.worker.engine import Engine
from mallee.worker.kv.watch import Rows
from mallee.worker.transfer.values import Ask, Loan

MAX_STEPS = 10_000  # an engine that has to bring something back, and never does, is no endless test


def lent_by(engine: Engine, ask: Ask, run: Callable[[Engine], None]) -> Loan:
    """A loan of `engine`, which is `run` while it has to bring something back first."""
    answers: list[Loan | MalleeError] = []
    engine.lend(ask, answers.append)
    for _ in range(MAX_STEPS):
        if answers:
            break
        assert engine.has_work, "it neither lends nor works"
        run(engine)
    else:
        raise AssertionError("it never answers")
    (answer,) = answers
    if isinstance(answer, MalleeError):
        raise answer
    return answer


def record_of(engine: Engine, capsule: str) -> CapsuleRecord:
    """The record of a capsule, as another worker gets it."""
    ask = Ask(holder(engine, capsule=capsule), (), engine.spec.identity)
    loan = lent_by(engine, ask, _step)
    loan.close()
    return decode_record(loan.record)


def _step(engine: Engine) -> None:
    engine.step()


class Neighbours:
    """A `Lender` that asks the engine that the holder's worker names. `run` steps one that has to work.

    `spoil` may put another loan in the place of one, or raise.
    """

    def __init__(self, run: Callable[[Engine], None] = _step) -> None:
        self.engines: dict[str, Engine] = {}
        self.asked: list[Ask] = []
        self.loans: list[Loan] = []
        self.spoil: Callable[[Loan], Loan] = lambda loan: loan
        self._run = run

    def lend(self, ask: Ask) -> Loan:
        self.asked.append(ask)
        engine = self.engines.get(ask.holder.worker)
        if engine is None:
            raise WorkerLost(ask.holder.worker, "nothing listens there")
        loan = self.spoil(lent_by(engine, ask, self._run))
        self.loans.append(loan)
        return loan


class ShortLoan:
    """A loan that breaks after so many blocks; with another `record`, if one is given.

    It doesn't tell of the last `num_lost` blocks.
    """

    def __init__(
        self,
        inner: Loan,
        num_blocks: int = 1 << 30,
        record: bytes | None = None,
        num_lost: int = 0,
    ) -> None:
        self._inner = inner
        self._num_lost = num_lost
        self._left = num_blocks
        self._record = record

    @property
    def record(self) -> bytes:
        return self._inner.record if self._record is None else self._record

    @property
    def num_blocks(self) -> int:
        return self._inner.num_blocks - self._num_lost

    @property
    def block_nbytes(self) -> int:
        return self._inner.block_nbytes

    def read(self, places: Sequence[int], rows: Rows) -> None:
        if len(places) > self._left:
            raise WorkerLost("peer", "the connection was cut")
        self._left -= len(places)
        self._inner.read(places, rows)

    def close(self) -> None:
        self._inner.close()


def holder(engine: Engine, num_tokens: int = 1 << 20, capsule: str = "") -> Holder:
    """`engine` as a holder of a text."""
    return Holder(engine.worker, engine.incarnation, "", num_tokens, capsule)
