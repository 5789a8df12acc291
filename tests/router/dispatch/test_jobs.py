"""Workers' commands hold everything that was asked for: whole, in parts, and computed anew."""

from typing import Any

import pytest

from mallee.mocker.passes import mock_spec
from mallee.protocol.hashing import as_tokens
from mallee.protocol.ids import CapsuleId, RequestId, Scope, capsule_id, private_part
from mallee.protocol.messages import (
    Fork,
    Generate,
    Grammar,
    Holder,
    Limits,
    Prefill,
    Sampling,
    Share,
    Update,
)
from mallee.router.dispatch.jobs import ForkJob, GenerateJob, PrefillJob, QueueTerms
from mallee.router.dispatch.texts import TokenTexts
from mallee.router.dispatch.token_memory import TokenMemory

TERMS = QueueTerms("ada", 3, 9.0, "tree", 2.0, 4.0)
WHOSE = Share("tree", 2.0, 3.0, "ada", 4.0)
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


def test_sessions_of_different_tenants_are_never_one() -> None:
    pairs = [("a", "s"), ("b", "s"), ("", "as"), ("as", ""), ("a", ""), ("", "a"), ("1:a", "s")]
    assert len({QueueTerms(t, session=s).share for t, s in pairs}) == len(pairs)
    assert QueueTerms().share == Share()


def test_a_text_with_a_nonce_is_nobody_elses_also_when_it_is_computed_again() -> None:
    """F7, part: an imported capsule's KV, and that of its forks, is under a salt of its own."""
    holder = Holder("g0", 1, "unix:/x", 3, "spool")
    scope, request = Scope("mine"), RequestId("r")
    salt = private_part(scope, "n")
    job = PrefillJob(TOKENS, scope, 5.0, nonce="n", holders=(holder,))
    told = job.command(request)
    assert isinstance(told, Prefill)
    assert (told.salt, told.holders, job.scope) == (salt, (holder,), scope)

    texts = TokenTexts(TokenMemory(1 << 20), mock_spec(), 1)
    plain = texts.hashes(PrefillJob(TOKENS, scope))
    assert not set(texts.hashes(job).tolist()) & set(plain.tolist())
    kept, forked = capsule_id(request), CapsuleId("f.0")
    end: Any = {"finish": "stop", "capsule": kept, "boundary": 3}
    texts.log(job, 0).take(Update("r", 0, **end))
    fork = ForkJob(kept, SUFFIXES[:1], LIMITS, scope=scope)
    texts.log(fork, 0).take(Update("f", 0, (7,), capsule=forked, boundary=5))
    for capsule in (kept, forked):
        text = texts.capsule_text(capsule, None)
        assert text is not None
        assert text.again(request, capsule, Share()).salt == salt
    resumed = texts.resumed(fork, 0, 0, texts.log(fork, 0))
    assert resumed is not None
    told = resumed.command(request)
    assert isinstance(told, Generate)
    assert told.salt == salt
