"""Blocks and capsules that workers fetch from each other, and holders that lend less than was asked."""

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from bench.doubles.random_model import random_model
from mallee.protocol.codec import encode
from mallee.protocol.errors import IncompatibleCapsule, MalleeError, WorkerLost
from mallee.protocol.messages import (
    Continuation,
    Demote,
    Generate,
    Grammar,
    Holder,
    Limits,
    Pin,
    Release,
    Sampling,
    pack_tokens,
)
from mallee.worker.capsules.record import CapsuleRecord, decode_record
from mallee.worker.transfer.loans import MAX_LOANS
from mallee.worker.transfer.prices import MeasuredPrices
from mallee.worker.transfer.values import DISK, HOST, Ask
from support.fold_forward import FoldForward
from support.lending import Neighbours, ShortLoan, holder
from support.tier_commands import flood, fork, generate, prefill, text, want
from support.tiers import DictDisk, LateMover, make_tiers

MakeBench = Callable[..., Any]
WINDOW_MODEL = random_model("gemma3_text", 3, sliding_window=6)
HYBRID_MODEL = random_model("qwen3_5_text", 3)


class Pair:
    """Two workers that lend to each other: `a` holds, `b` fetches."""

    def __init__(self, make_bench: MakeBench, host_blocks: int = 0, **more: Any) -> None:
        self.lender = Neighbours()
        self.failures: list[MalleeError] = []
        self.movers: list[LateMover] = []
        is_late = more.pop("is_late", False)
        prices = more.pop("prices", None)
        make_forward = more.pop("make_forward", lambda **_: None)
        self.a, self.b = (
            make_bench(
                worker=name,
                below=make_tiers(
                    host_blocks,
                    disk=DictDisk() if name == "a" else None,
                    peers=self.lender,
                    failures=self.failures,
                    prices=prices,
                    movers=self.movers if is_late and name == "b" else None,
                ),
                forward=make_forward(num_blocks=64, block_size=4),
                **more,
            )
            for name in ("a", "b")
        )
        self.lender.engines = {"a": self.a.engine, "b": self.b.engine}

    def holds(self, tokens: int = 1 << 20, capsule: str = "") -> Holder:
        return holder(self.a.engine, tokens, capsule)

    def move_all(self) -> None:
        self.b.run()
        while self.movers[0].num_under_way:
            self.movers[0].advance()
            self.b.run()

    def check_nothing_is_lent(self) -> None:
        self.b.run()
        self.a.run()
        for bench in (self.a, self.b):
            assert bench.engine.stats().lending.open == 0
            bench.engine.check()

    def fetch(self, tokens: list[int], *holders: Holder, **more: Any) -> Any:
        """The last update of b's answer to `tokens`, of which others hold a part."""
        self.b.run(generate("g", tokens, *(holders or [self.holds(len(tokens) - 1)]), **more))
        self.check_answers(tokens, "g")
        return self.b.answers["g", 0].last

    def check_answers(self, tokens: list[int], *requests: str) -> None:
        for request in requests:
            assert self.b.answers[request, 0].tokens == want(self.b, tokens)


MakePair = Callable[..., Pair]


@pytest.fixture
def make_pair(make_bench: MakeBench) -> Iterator[MakePair]:
    """Pairs of which none lends anything in the end."""
    made: list[Pair] = []

    def make(**more: Any) -> Pair:
        made.append(Pair(make_bench, **more))
        return made[-1]

    yield make
    for each in made:
        each.check_nothing_is_lent()


@pytest.fixture
def pair(make_pair: MakePair) -> Pair:
    return make_pair()


# Prefixes


@pytest.mark.parametrize(("n", "num_here"), [(1, 0), (3, 0), (1, 5)])
def test_a_prompt_fetches_what_it_lacks_and_another_worker_has(
    pair: Pair, n: int, num_here: int
) -> None:
    pair.a.run(generate("g", text(41)))
    if num_here:
        pair.b.run(generate("early", text(4 * num_here + 1)))
    before = pair.b.forward.num_tokens
    assert pair.fetch(text(41), n=n).cached_tokens == 40
    assert pair.b.engine.stats().tiers.num_fetched_peer == 10 - num_here
    assert pair.b.forward.num_tokens - before <= 1 + 8 * n
    assert pair.a.engine.stats().lending == (1, 1, 0)
    pair.check_nothing_is_lent()
    assert pair.a.engine.stats().lending == (0, 1, 10 - num_here)


def test_a_holder_lends_what_it_has_in_host_memory(make_pair: MakePair) -> None:
    pair = make_pair(host_blocks=64, num_blocks=24, max_answer_capsules=0)
    pair.a.run(generate("g", text(41)))
    flood(pair.a)
    pair.fetch(text(41))
    assert pair.b.engine.stats().tiers.num_fetched_peer == 10
    pair.check_nothing_is_lent()
    assert pair.a.engine.stats().tiers.host_held == 0


def test_a_long_text_comes_in_pieces_that_waiters_follow(make_pair: MakePair) -> None:
    pair = make_pair(is_late=True, num_blocks=700)
    long, short = text(2001), text(1025)
    pair.a.run(generate("g", long))
    pair.b.submit(generate("g", long, pair.holds(2000)))
    pair.b.step()
    pair.b.submit(generate("s", short))
    pair.b.run()
    pair.movers[0].advance()  # the loan
    pair.b.run()
    pair.movers[0].advance()  # 256 blocks of 500
    pair.b.run()
    pair.check_answers(short, "s")
    assert ("g", 0) not in pair.b.answers
    pair.move_all()
    pair.check_answers(long, "g")
    assert pair.b.answers["g", 0].last.cached_tokens == 2000


class Dear(MeasuredPrices):
    """Prices of computing, of host memory, and of a peer."""

    def __init__(self, compute_s: float, host_s: float, peer_s: float) -> None:
        super().__init__(32)
        self._own_s = compute_s, host_s, peer_s

    def fetch_s(self, tier: int, num_blocks: int) -> float:
        return self._own_s[1 if tier == HOST else 2]

    def compute_s(self, num_tokens: int) -> float:
        return self._own_s[0]


def test_what_is_dearer_than_computing_is_not_asked_for(make_pair: MakePair) -> None:
    pair = make_pair(prices=Dear(1e-6, 1.0, 1.0))
    pair.a.run(generate("g", text(41)))
    pair.fetch(text(41))
    assert not pair.lender.asked
    assert pair.b.engine.stats().tiers.num_declined == 10


def test_a_block_here_that_is_dear_keeps_no_peer_from_being_asked(make_pair: MakePair) -> None:
    prices = Dear(1e-3, 1.0, 1e-6)
    pair = make_pair(host_blocks=64, prices=prices, num_blocks=24, max_answer_capsules=0)
    pair.b.run(generate("early", text(13)))
    flood(pair.b)
    pair.a.run(generate("g", text(41)))
    pair.fetch(text(41))
    tiers = pair.b.engine.stats().tiers
    assert (tiers.num_fetched_peer, tiers.num_fetched_host) == (10, 0)


def test_one_holder_goes_on_where_the_other_ends(
    make_bench: MakeBench, make_pair: MakePair
) -> None:
    pair = make_pair()
    third = make_bench(worker="c", below=make_tiers(peers=pair.lender))
    pair.lender.engines["c"] = third.engine
    pair.a.run(generate("g", text(21)))
    third.run(generate("g", text(41)))
    pair.fetch(text(41), pair.holds(20), holder(third.engine, 40))
    assert pair.b.engine.stats().tiers.num_fetched_peer == 10
    pair.check_nothing_is_lent()
    third.run()
    assert [b.engine.stats().lending.num_blocks for b in (pair.a, third)] == [5, 5]


def test_a_prompt_keeps_what_it_has_while_a_holder_is_asked_for_the_rest(
    make_bench: MakeBench, make_pair: MakePair
) -> None:
    """The branch that lacks its blocks gives way itself, until the holder has answered."""
    pair = make_pair(is_late=True, num_blocks=24, max_answer_capsules=0)
    third = make_bench(worker="c", below=make_tiers(peers=pair.lender))
    pair.lender.engines["c"] = third.engine
    pair.a.run(generate("g", text(21)))
    third.run(generate("g", text(41)))
    bench, mover = pair.b, pair.movers[0]
    old = Generate("old", pack_tokens(text(29, first=30)), Limits(60, ignore_eos=True))
    bench.submit(old)
    bench.step()
    bench.submit(generate("g", text(41), pair.holds(20), holder(third.engine, 40)))
    bench.step()
    for _ in range(2):  # the first holder's answer, and its blocks
        mover.advance()
        bench.step()
    assert bench.engine.stats().tiers.num_fetched_peer == 5
    bench.run()
    assert bench.engine.stats().sched.num_preemptions == 1
    pair.move_all()
    pair.check_answers(text(41), "g")
    assert bench.engine.stats().tiers.num_fetched_peer == 10
    assert len(bench.answers["old", 0].tokens) == 60
    third.run()


@pytest.mark.parametrize("num", [0, 3, 17])
def test_what_a_holder_does_not_give_is_computed(pair: Pair, num: int) -> None:
    """The connection is cut after so many blocks, of which a pass reads 16; or a second holder gives it."""
    pair.a.run(generate("g", text(101)))
    is_short = iter([True, True, False])
    pair.lender.spoil = lambda loan: ShortLoan(loan, num) if next(is_short) else loan
    assert pair.fetch(text(101)).cached_tokens == 4 * (num // 16 * 16)
    assert [type(error).__name__ for error in pair.failures] == ["WorkerLost"]
    other = text(101, first=20)
    pair.a.run(generate("other", other))
    pair.b.run(generate("h", other, pair.holds(100), pair.holds(100)))
    pair.check_answers(other, "h")
    assert pair.b.answers["h", 0].last.cached_tokens == 100


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("make_forward", [FoldForward, WINDOW_MODEL.forward, HYBRID_MODEL.forward])
def test_a_holder_may_have_more_of_a_text_than_is_of_use(
    make_pair: MakePair, make_forward: Callable[..., Any]
) -> None:
    """Its last block is computed for the logits, whatever the groups of layers read below it."""
    pair = make_pair(make_forward=make_forward)
    a, b = pair.a, pair.b
    tokens = [3 + i % 3 for i in range(40)]
    a.run(generate("g", tokens))
    b.run(generate("g", tokens, pair.holds(40)))
    assert b.answers["g", 0].tokens == a.answers["g", 0].tokens
    assert b.answers["g", 0].last.cached_tokens == 36


def test_holders_that_have_nothing_are_gone_or_of_another_life_cost_nothing_else(
    pair: Pair,
) -> None:
    old = msgspec.structs.replace(pair.holds(40), incarnation=9)
    gone = msgspec.structs.replace(pair.holds(40), worker="x")
    other = text(41)[::-1]
    pair.a.run(generate("g", other))
    pair.fetch(text(41), gone, old, pair.holds(40))
    assert len(pair.lender.asked) == 3
    assert [type(error).__name__ for error in pair.failures] == ["WorkerLost"] * 2
    assert pair.b.engine.stats().tiers.num_failed == 2


def test_a_loan_that_is_not_read_is_over(make_pair: MakePair) -> None:
    pair = make_pair()
    pair.a.run(generate("g", text(41)))
    taken: list[Any] = []
    keys = tuple(pair.a.engine._tree.notation.hashes(text(40), 4, salt=salt_of(pair.a)).tolist())
    ask = Ask(pair.holds(40), keys, pair.a.engine.spec.identity)
    pair.a.engine.lend(ask, taken.append)
    (loan,) = taken
    assert loan.num_blocks == 10
    pair.a.now += 31
    assert pair.a.engine.has_work
    pair.a.run()
    assert pair.a.engine.stats().lending.open == 0
    with pytest.raises(WorkerLost, match="over"):
        loan.read([0], np.zeros((1, 32), np.uint8))


def test_what_was_read_while_the_lenders_life_ended_does_not_count(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its next life has the same memory, and may write there before the copy is done."""
    pair.a.run(prefill("p", text(9)))
    engine, read = pair.a.engine, pair.a.forward.read
    loan = pair.lender.lend(Ask(pair.holds(9, "p.0"), (), engine.spec.identity))

    def read_late(blocks: Any, rows: Any) -> None:
        engine.close()
        read(blocks, rows)

    monkeypatch.setattr(pair.a.forward, "read", read_late)
    with pytest.raises(WorkerLost, match="over"):
        loan.read([0], np.zeros((1, 32), np.uint8))


@pytest.mark.parametrize("is_below", [False, True])
def test_a_loan_has_nothing_of_what_others_left_in_a_capsules_last_block(
    make_pair: MakePair, *, is_below: bool
) -> None:
    """An export of one tenant would tell of another's text."""
    pair = make_pair(host_blocks=64, num_blocks=24, max_answer_capsules=0)
    for token in (5, 6):
        pair.a.run(generate(f"other{token}", [token] * 88))
    pair.a.run(prefill("p", text(9)))
    if is_below:
        pair.a.run(Demote("d", "p.0", HOST))
        flood(pair.a)
    loan = pair.lender.lend(Ask(pair.holds(9, "p.0"), (), pair.a.engine.spec.identity))
    row = np.zeros(32, np.uint8)
    loan.read([2], row[np.newaxis])
    loan.close()
    slots = row.view(np.uint64)
    assert slots[0]
    assert not slots[1:].any()


def test_loans_are_bounded(make_pair: MakePair) -> None:
    pair = make_pair()
    pair.a.run(prefill("p", text(9)))
    taken: list[Any] = []
    ask = Ask(pair.holds(9, "p.0"), (), pair.a.engine.spec.identity)
    for _ in range(MAX_LOANS + 1):
        pair.a.engine.lend(ask, taken.append)
    assert [type(each).__name__ for each in taken[-2:]] == ["BlockLoan", "LoansFull"]
    pair.a.engine.check()
    for loan in taken[:-1]:
        loan.close()


@pytest.mark.parametrize("num_asked", [0, 1, 3, 4])
def test_loans_of_a_forked_capsule_are_ready_before_its_step(
    make_pair: MakePair, num_asked: int
) -> None:
    """X6, part: other threads take them while the branches of the fork are computed; each once."""
    pair = make_pair()
    pair.a.run(prefill("p", text(17)))
    engine = pair.a.engine
    ask = Ask(pair.holds(17, "p.0"), (), engine.spec.identity)
    assert engine.take_loan(ask) is None
    engine.submit(fork("f", "p.0", 2, loans=3), "g0")
    taken = [engine.take_loan(ask) for _ in range(num_asked)]
    assert [loan is None for loan in taken] == [False, False, False, True][:num_asked]
    engine.check()
    pair.a.run()
    rows = np.zeros((5, engine._forward.memory.block_nbytes), np.uint8)
    for loan in filter(None, taken):
        assert decode_record(loan.record).tokens == pack_tokens(text(17))
        loan.read(range(5), rows)
        assert rows[0].any()
        loan.close()
    pair.a.run()
    assert engine.stats().lending.open == 3 - min(3, num_asked)
    pair.a.now += 31  # nobody has come for the others
    pair.a.run()
    assert engine.take_loan(ask) is None
    assert not engine._loans._ready


def test_a_loan_that_is_claimed_while_idle_ones_end_stays_open(make_pair: MakePair) -> None:
    """Another thread may claim one at any time: here, as the engine's thread tells of the end of its twin."""
    pair = make_pair()
    pair.a.run(prefill("p", text(17)))
    engine = pair.a.engine
    ask = Ask(pair.holds(17, "p.0"), (), engine.spec.identity)
    engine.submit(fork("f", "p.0", loans=2), "g0")
    pair.a.run()
    claimed: list[Any] = []

    def claim() -> None:
        if not claimed and (loan := engine.take_loan(ask)) is not None:
            claimed.append(loan)

    engine.notify(claim)
    pair.a.now += 31
    pair.a.run()
    (loan,) = claimed
    rows = np.zeros((5, loan.block_nbytes), np.uint8)
    loan.read(range(5), rows)
    assert rows.any(axis=1).all()
    loan.close()


def test_loans_that_are_ready_are_of_this_life_and_model_and_end_with_it(
    make_pair: MakePair,
) -> None:
    pair = make_pair()
    pair.a.run(prefill("p", text(17)))
    engine, there = pair.a.engine, pair.holds(17, "p.0")
    engine.submit(fork("f", "p.0", 1, loans=MAX_LOANS + 9), "g0")
    assert engine.stats().lending.open == MAX_LOANS
    with pytest.raises(IncompatibleCapsule):
        engine.take_loan(Ask(there, (), "another"))
    other = msgspec.structs.replace(there, incarnation=there.incarnation + 1)
    with pytest.raises(WorkerLost, match="is over"):
        engine.take_loan(Ask(other, (), engine.spec.identity))
    engine.submit(fork("f2", "p.0", 1, loans=1), "g0")
    pair.a.run()
    engine.check()
    engine.close()
    assert engine.take_loan(Ask(there, (), engine.spec.identity)) is None


def salt_of(bench: Any) -> str:
    return str(bench.engine.spec.salt())


# Capsules


def kv_of(bench: Any, capsule: str) -> Any:
    found = bench.engine._capsules.peek(capsule)
    blocks = bench.engine._tree.table(found.node)
    return bench.forward.kv[blocks].reshape(-1)[: found.num_computed].copy()


@pytest.mark.slow
@pytest.mark.parametrize("num_tokens", [1, 3, 4, 16, 17, 40, 2001])
@pytest.mark.parametrize("where", ["device", "host", "disk", "disk alone"])
def test_a_capsule_comes_whole_and_nothing_of_it_is_computed(
    make_pair: MakePair, num_tokens: int, where: str
) -> None:
    """S8, X6, part: its partial block, its logits, from the device, host memory or disk."""
    host_blocks = 600 if where == "host" else 0
    pair = make_pair(host_blocks=host_blocks, num_blocks=600, max_answer_capsules=0)
    tokens = text(num_tokens)
    pair.a.run(prefill("p", tokens))
    before = kv_of(pair.a, "p.0")
    if where != "device":
        pair.a.run(Demote("d", "p.0", HOST if where == "host" else DISK))
    if where == "disk alone":
        flood(pair.a)
    pair.b.run(prefill("q", tokens, pair.holds(num_tokens, "p.0"), capsule="p.0"))
    assert pair.b.forward.num_tokens == 0
    assert (kv_of(pair.b, "p.0") == before).all()
    assert pair.b.answers["q", 0].last.capsule == "p.0"
    assert pair.b.answers["q", 0].last.cached_tokens == num_tokens
    pair.b.run(fork("f", "p.0", n=2))
    assert pair.b.answers["f", 0].tokens == want(pair.b, tokens)
    assert not pair.failures
    pair.check_nothing_is_lent()
    pair.b.run(Release("p.0"))
    stats = pair.b.engine.stats()
    assert stats.pool.free + stats.tree.cached_blocks == stats.pool.total


def test_an_answers_capsule_comes_with_what_it_has_pending(pair: Pair) -> None:
    """X6, part: the token drawn last has no KV yet; forks that wait compute it themselves."""
    pair.a.run(generate("g", text(21)))
    whole = text(21) + pair.a.answers["g", 0].tokens
    holds = pair.holds(len(whole), "g.0")
    pair.b.submit(prefill("m", whole, holds, capsule="g.0"))
    pair.b.submit(fork("early", "g.0"), fork("at", "g.0", at=17))
    pair.b.run()
    moved = pair.b.engine._capsules.peek("g.0")
    assert moved.pending == (whole[-1],)
    assert moved.continuation == pair.a.engine._capsules.peek("g.0").continuation
    assert pair.b.engine.stats().tiers.num_fetched_peer == 7
    pair.b.run(fork("late", "g.0"))
    pair.check_answers(whole, "early", "late")
    pair.check_answers(whole[:17], "at")


def test_forks_wait_for_a_capsule_that_comes_without_logits(pair: Pair) -> None:
    """It was unpinned: its forks compute its last tokens again."""
    pair.a.run(prefill("p", text(16)))
    pair.a.run(Pin("u", "p.0", is_pinned=False))
    pair.b.submit(prefill("m", text(16), pair.holds(16, "p.0"), capsule="p.0"))
    pair.b.submit(fork("f", "p.0", n=2))
    pair.b.run()
    pair.check_answers(text(16), "f")


@pytest.mark.parametrize("num_cached", [0, 20, 37])
def test_what_is_here_of_a_capsule_is_not_fetched(pair: Pair, num_cached: int) -> None:
    pair.a.run(prefill("p", text(38)))
    if num_cached:
        pair.b.run(generate("g", text(num_cached)))
    fetched = pair.b.forward.num_tokens
    pair.b.run(prefill("m", text(38), pair.holds(38, "p.0"), capsule="p.0"))
    assert pair.b.forward.num_tokens == fetched
    assert pair.b.engine.stats().tiers.num_fetched_peer == 10 - num_cached // 4
    pair.b.run(fork("f", "p.0"))
    pair.check_answers(text(38), "f")


def test_a_moved_capsule_is_of_the_scope_that_it_moved_to(pair: Pair) -> None:
    """X6, part: blocks of another scope, as of an imported file, are found by none but their own."""
    pair.a.run(prefill("p", text(38), salt="x"))
    pair.b.run(prefill("m", text(38), pair.holds(38, "p.0"), capsule="q.0", salt="mine"))
    assert pair.b.forward.num_tokens == 0
    assert pair.b.engine._capsules.peek("q.0").salt == pair.b.engine.spec.salt("mine")
    for salt, cached in (("x", 0), ("", 0), ("mine", 36)):
        pair.b.run(generate(f"g{salt}", text(38), salt=salt))
        assert pair.b.answers[f"g{salt}", 0].tokens == want(pair.b, text(38))
        assert pair.b.answers[f"g{salt}", 0].last.cached_tokens == cached


def changed(**fields: Any) -> Callable[[CapsuleRecord], bytes]:
    return lambda record: encode(msgspec.structs.replace(record, **fields))


REST = Continuation(Sampling(), Limits(64), 0, 3)
FORGERIES: dict[str, Callable[[CapsuleRecord], bytes]] = {
    "torn": lambda record: encode(record)[:-9],
    "huge": changed(salt="x" * (6 << 20)),
    "model": changed(fingerprint="other"),
    "block size": changed(block_size=0),
    "other tokens": changed(tokens=pack_tokens(text(38)[::-1])),
    "bytes that are no tokens": changed(tokens=b"abc"),
    "too much computed": changed(num_computed=39),
    "fewer computed than lent": changed(num_computed=36, has_tail=False, keys=b"\0" * 72),
    "no keys": changed(keys=b""),
    "no tail": changed(has_tail=False),
    "short logits": changed(logits=b"1234"),
    "logits too early": changed(num_computed=37),
    "hot": changed(continuation=msgspec.structs.replace(REST, sampling=Sampling(float("nan")))),
    "drawn": changed(continuation=msgspec.structs.replace(REST, drawn=38)),
    "drew more than it may": changed(continuation=Continuation(Sampling(), Limits(2), 0, 3)),
    "bias": changed(
        continuation=msgspec.structs.replace(REST, sampling=Sampling(logit_bias=((99, 1.0),)))
    ),
    "grammar": changed(grammar=Grammar("regex", "a", 39)),
    "inherited grammar": changed(grammar=Grammar("inherit")),
    "grammar of nothing": changed(grammar=Grammar("regex", "a", -1)),
    "long grammar": changed(grammar=Grammar("regex", "a" * (2 << 20))),
}


@pytest.mark.parametrize("way", FORGERIES)
def test_a_record_that_can_not_be_is_refused_by_name_and_the_text_computed(
    pair: Pair, way: str
) -> None:
    """X6, part: it may be damaged, of another model, or forged."""
    pair.a.run(prefill("p", text(38)))
    pair.lender.spoil = lambda loan: ShortLoan(
        loan, record=FORGERIES[way](decode_record(loan.record))
    )
    pair.b.run(prefill("m", text(38), pair.holds(38, "p.0"), capsule="p.0"))
    assert pair.b.engine.stats().tiers.num_fetched_peer == 0
    pair.b.run(fork("f", "p.0"))
    pair.check_answers(text(38), "f")
    (failure,) = pair.failures
    assert failure.code in ("malformed_message", "incompatible_capsule", "invalid_parameter")
    assert pair.b.engine.stats().tiers.num_failed == 1


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("num_lost", [0, 1, 38])
def test_a_capsule_without_all_of_its_state_is_refused_by_name(
    make_pair: MakePair, num_lost: int
) -> None:
    """F1, part, F11, part: of 38 rows of the size of a block the last few have the convolutions' inputs."""
    pair = make_pair(make_forward=HYBRID_MODEL.forward)
    tokens = text(38)
    pair.a.run(prefill("p", tokens))
    pair.lender.spoil = lambda loan: ShortLoan(loan, num_lost=num_lost)
    pair.b.run(prefill("m", tokens, pair.holds(38, "p.0"), capsule="p.0"))
    for bench in (pair.a, pair.b):
        bench.run(fork("f", "p.0"))
    assert pair.b.answers["f", 0].tokens == pair.a.answers["f", 0].tokens
    num_fetched = 0 if num_lost else 10 + 38
    assert pair.b.engine.stats().tiers.num_fetched_peer == num_fetched
    told = [(error.code, error.fields["differences"]) for error in pair.failures]
    due = [["blocks", str(48 - num_lost), "48"]]
    assert told == ([("incompatible_capsule", due)] if num_lost else [])


def test_a_capsule_that_is_unknown_or_of_another_model_is_computed(pair: Pair) -> None:
    pair.a.run(prefill("p", text(38)))
    pair.b.run(prefill("m", text(38), pair.holds(38, "gone.0")))
    taken: list[Any] = []
    pair.a.engine.lend(Ask(pair.holds(38, "p.0"), (), "other"), taken.append)
    assert [error.code for error in (*pair.failures, *taken)] == [
        "capsule_not_found",
        "incompatible_capsule",
    ]
    assert pair.b.answers["m", 0].last.capsule == "m.0"


def test_an_answer_takes_no_capsule(pair: Pair) -> None:
    """A holder's capsule is for a command that makes one; the blocks are found by their keys."""
    pair.a.run(prefill("p", text(41)))
    pair.fetch(text(41), pair.holds(41, "p.0"), pair.holds(40))
    assert pair.b.engine.stats().tiers.num_fetched_peer == 10
