"""Tokens of capsules, least recently used out first, and commands, which hold all that was asked for."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

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
from mallee.router.dispatch.jobs import ForkJob, GenerateJob, Job, PrefillJob, QueueTerms
from mallee.router.dispatch.texts import TokenLog, TokenTexts
from mallee.router.dispatch.token_memory import ENTRY_NBYTES, CapsuleTokens, TokenMemory, TokenPath


def path_of(memory: TokenMemory, name: str) -> TokenPath | None:
    entry = memory.get(CapsuleId(name))
    return None if entry is None else entry.path


def known(memory: TokenMemory, name: str) -> list[int] | None:
    path = path_of(memory, name)
    return None if path is None else path.tokens().tolist()


def keep(memory: TokenMemory, name: str, path: TokenPath) -> None:
    memory.keep(CapsuleId(name), CapsuleTokens(path))


def root(tokens: list[int], salt: str = "") -> TokenPath:
    return TokenPath(None, as_tokens(tokens), salt)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["keep", "find", "forget"]),
            st.integers(0, 9),
            st.integers(0, 9),
            st.integers(0, 40),
        ),
        max_size=60,
    )
)
def test_it_agrees_with_a_list_of_capsules_by_last_use(
    steps: list[tuple[str, int, int, int]],
) -> None:
    """A model that stores every text in full; bytes are checked after every step."""
    memory = TokenMemory(6 * ENTRY_NBYTES)
    texts: dict[str, list[int]] = {}  # every text ever kept
    for number, (act, one, other, length) in enumerate(steps):
        name = f"c{one}"
        match act:
            case "keep":
                tail = [number] * length
                parent = path_of(memory, f"c{other}")
                before = [] if parent is None else texts[f"c{other}"]
                texts[name] = before + tail
                keep(memory, name, TokenPath(parent, as_tokens(tail), ""))
            case "find":
                assert known(memory, name) in (None, texts.get(name))
            case "forget":
                memory.forget(CapsuleId(name))
                assert known(memory, name) is None
        memory.check()


def test_the_least_recently_used_is_forgotten_first() -> None:
    memory = TokenMemory(3 * (ENTRY_NBYTES + 40))
    for name in "abc":
        keep(memory, name, root([ord(name)] * 10))
    assert known(memory, "a") == [ord("a")] * 10  # now the most recently used
    keep(memory, "d", root([1] * 10))
    assert [known(memory, name) is not None for name in "abcd"] == [True, False, True, True]


def test_a_text_too_large_for_it_is_not_kept() -> None:
    memory = TokenMemory(1000)
    keep(memory, "a", root([1] * 10))
    keep(memory, "b", root([1] * 1000))
    assert len(memory) == memory.nbytes == 0
    memory.check()


def test_the_beginning_of_a_path_shares_what_lies_above() -> None:
    """F5, part: a fork at an earlier boundary is remembered by the tokens it continues."""
    prompt = root([1, 2, 3], salt="acme")
    path = TokenPath(prompt, as_tokens([4, 5]), prompt.scope)
    for n in range(1, 6):
        first = path.first(n)
        assert (first.length, first.scope, first.tokens().tolist()) == (
            n,
            "acme",
            [1, 2, 3, 4, 5][:n],
        )
    assert path.first(5) is path
    assert path.first(3) is prompt
    assert path.first(4).parent is prompt


PROMPT = as_tokens([1, 2, 3])
ONE = GenerateJob(PROMPT, Limits(9))


def logged(job: Job, *updates: Update, memory: TokenMemory | None = None) -> TokenMemory:
    memory = memory or TokenMemory(1 << 20)
    log = TokenLog(memory, job, 0)
    for update in updates:
        log.take(update)
    return memory


def with_capsule(*suffixes: list[int]) -> tuple[TokenMemory, ForkJob]:
    """A memory that knows a capsule, and a fork of it."""
    memory = TokenMemory(1 << 20)
    keep(memory, "c.0", root([1, 2, 3]))
    return memory, ForkJob(CapsuleId("c.0"), [as_tokens(s) for s in suffixes], Limits(9))


def test_a_capsule_with_tokens_that_were_not_heard_is_not_kept() -> None:
    memory = logged(ONE, Update("r", 0, (9,), "stop", capsule="r.0", boundary=7))
    assert known(memory, "r.0") is None


def test_what_is_kept_does_not_change_with_the_buffer_it_came_from() -> None:
    memory, _ = with_capsule()
    suffix = np.array([4, 5], dtype="<u4")
    job = ForkJob(CapsuleId("c.0"), [suffix], Limits(9))
    logged(job, Update("r", 0, (6,), "stop", capsule="r.0", boundary=6), memory=memory)
    suffix[:] = 0
    assert known(memory, "r.0") == [1, 2, 3, 4, 5, 6]


def test_a_branch_goes_on_from_all_that_it_has_drawn() -> None:
    """X4, part: twice cut off, and under its grammar."""
    grammar = Grammar("regex", "a+")
    memory, fork = with_capsule([4], [5, 6])
    log = TokenLog(memory, replace(fork, grammar=grammar, sampling=Sampling(seed=7)), 0)
    log.take(Update("r", 1, (8, 9)))
    again = log.resumed(1, 2)
    assert again is not None
    assert as_list(again) == [1, 2, 3, 5, 6, 8, 9]
    assert (again.drawn, again.n, again.sampling.seed) == (2, 1, 7)
    assert again.grammar == Grammar("regex", "a+", 2)
    log = TokenLog(memory, again, 0)
    log.take(Update("r-1", 0, (1,)))
    last = log.resumed(0, 1)
    assert last is not None
    assert as_list(last) == [1, 2, 3, 5, 6, 8, 9, 1]
    assert (last.drawn, last.grammar) == (3, Grammar("regex", "a+", 3))


def test_a_fork_inside_a_grammar_goes_on_in_what_its_capsule_was_in() -> None:
    """X4, part, D9: its suffix is part of the constrained text."""
    memory = TokenMemory(1 << 20)
    entry = CapsuleTokens(root([1, 2, 3]), Grammar("regex", "a+", 2))
    memory.keep(CapsuleId("c.0"), entry)
    fork = ForkJob(CapsuleId("c.0"), [as_tokens([4])], Limits(9), grammar=Grammar("inherit"))
    log = TokenLog(memory, fork, 0)
    log.take(Update("r", 0, (8, 9)))
    again = log.resumed(0, 2)
    assert again is not None
    assert again.grammar == Grammar("regex", "a+", 5)
    log.take(Update("r", 0, (), "length", capsule="r.0", boundary=6))
    left = memory.get(CapsuleId("r.0"))
    assert left is not None
    assert left.grammar == Grammar("regex", "a+", 5)


def as_list(job: GenerateJob) -> list[int]:
    return np.frombuffer(job.tokens.tobytes(), dtype="<u4").tolist()


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
        assert text.prefill(request, Share(), lost=capsule).salt == salt
    resumed = texts.resumed(fork, 0, 0, texts.log(fork, 0))
    assert resumed is not None
    told = resumed.command(request)
    assert isinstance(told, Generate)
    assert told.salt == salt
