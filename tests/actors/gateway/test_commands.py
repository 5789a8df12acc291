"""Workers' commands hold everything that was asked for: whole, in parts, and computed anew."""

from types import SimpleNamespace
from typing import Any

import pytest

from mallee.actors.gateway.answers import RunningAnswer
from mallee.actors.gateway.jobs import ForkJob, GenerateJob, PrefillJob, QueueTerms
from mallee.actors.gateway.running import Running
from mallee.actors.gateway.shards import route_job
from mallee.actors.gateway.token_memory import TokenMemory, TokenPath
from mallee.protocol.hashing import NO_HASHES, as_tokens
from mallee.protocol.ids import CapsuleId, RequestId, WorkerId
from mallee.protocol.messages import Fork, Generate, Grammar, Limits, Prefill, Sampling, Share

TERMS = QueueTerms("ada", 3, 9.0, "tree", 2.0)
WHOSE = Share("3:adatree", 2.0, 3.0)
LIMITS = Limits(9, (4,), True, 2)
SAMPLING = Sampling(0.5, 4, 0.9, 6, 0.1, 1.2, 0.3, 0.4, ((5, 1.0),), 3)
GRAMMAR = Grammar("regex", "a+")
TOKENS = as_tokens([1, 2, 3])
SUFFIXES = [as_tokens([i]) for i in range(4)]
GENERATE = GenerateJob(TOKENS, LIMITS, SAMPLING, 4, "salt", TERMS, GRAMMAR)
FORK = ForkJob(CapsuleId("c.0"), SUFFIXES, LIMITS, SAMPLING, TERMS, GRAMMAR)


def check_told(told: Any) -> None:
    assert told.limits == LIMITS
    assert told.sampling == SAMPLING
    assert told.grammar == GRAMMAR
    assert told.share == WHOSE


def test_every_field_of_a_job_is_told() -> None:
    """I17, S13, part: nothing that a client said gets lost on the way."""
    prefill = PrefillJob(TOKENS, "salt", 5.0, TERMS).command(RequestId("r"))
    assert prefill == Prefill("r", TOKENS.tobytes(), "salt", 5.0, WHOSE)
    generate = GENERATE.command(RequestId("r"))
    assert isinstance(generate, Generate)
    assert (generate.n, generate.salt, generate.first_branch) == (4, "salt", 0)
    check_told(generate)
    fork = FORK.command(RequestId("r"))
    assert isinstance(fork, Fork)
    assert fork.suffixes == tuple(s.tobytes() for s in SUFFIXES)
    check_told(fork)


@pytest.mark.parametrize("job", [GENERATE, FORK])
def test_a_part_is_told_all_but_the_other_rows(job: Any) -> None:
    told: Any = job.part(range(1, 3)).command(RequestId("r-1"), 1)
    assert told.first_branch == 1
    assert (told.n if isinstance(told, Generate) else len(told.suffixes)) == 2
    check_told(told)


def test_a_fork_that_is_computed_elsewhere_keeps_what_was_asked_for() -> None:
    """I17: the capsule is computed for the same session, and the fork of it is the same fork."""
    memory = TokenMemory(1 << 20)
    memory.keep(FORK.capsule, TokenPath(None, TOKENS, "salt"))
    recompute = FORK.recompute(RequestId("r-1"), memory)
    assert recompute is not None
    assert recompute.prefill.share == WHOSE
    assert (recompute.prefill.tokens, recompute.prefill.salt) == (TOKENS.tobytes(), "salt")
    answer = RunningAnswer(RequestId("r-1"), WorkerId("w"), 4, cancel_branch=lambda *_: None)
    running = Running(answer, WorkerId("w"), NO_HASHES, recompute.job, 0.0, 2)
    told: Any = running.fork_of(recompute)[0]
    assert (told.capsule, told.first_branch) == ("r-1-r.0", 2)
    check_told(told)


def test_a_fork_that_inherits_its_grammar_stays_with_its_capsule() -> None:
    """D9: where a text is in its grammar, only the capsule's worker knows."""
    asked: list[bool] = []

    class Routing:
        def capsule(self, _: str) -> Any:
            return SimpleNamespace(boundary=3)

        def route_fanout(self, *_: Any, can_recompute: bool, **__: Any) -> list[Any]:
            asked.append(can_recompute)
            return []

    for grammar in (None, GRAMMAR, Grammar("inherit")):
        job = ForkJob(CapsuleId("c.0"), SUFFIXES, LIMITS, SAMPLING, TERMS, grammar)
        router: Any = Routing()
        route_job(
            router, RequestId("r"), job, NO_HASHES, may_wait=True, recomputable={CapsuleId("c.0")}
        )
    assert asked == [True, True, False]


def test_sessions_of_different_tenants_are_never_one() -> None:
    pairs = [("a", "s"), ("b", "s"), ("", "as"), ("as", ""), ("a", ""), ("", "a"), ("1:a", "s")]
    assert len({QueueTerms(t, session=s).share.session for t, s in pairs}) == len(pairs)
    assert QueueTerms().share == Share()
