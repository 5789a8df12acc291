"""Answers that are cut off anywhere and go on in a fresh engine, against the undisturbed run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from msgspec.structs import replace

from mallee.protocol.messages import (
    Command,
    Fork,
    Generate,
    Grammar,
    Limits,
    Prefill,
    Sampling,
    TokenLogprobs,
    Update,
    pack_tokens,
)
from mallee.worker.engine import Engine

MakeEngine = Callable[[], Engine]
AGAIN = "again"
OWN_ID = "lost.7"  # of a capsule that is built again
HOT = Sampling(temperature=1.0, seed=77)
_NOTHING = Update("", 0)


@dataclass
class Ended:
    """All updates of one branch, added up."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    last: Update = _NOTHING


def play(engine: Engine, *commands: Command) -> dict[tuple[str, int], Ended]:
    """Run `commands` to idle, checking invariants."""
    for command in commands:
        assert engine.submit(command, "g") is None
    found: dict[tuple[str, int], Ended] = {}
    while engine.has_work:
        for frame in engine.step().frames.values():
            for update in frame.updates:
                ended = found.setdefault((update.request, update.branch), Ended())
                ended.tokens += update.tokens
                ended.logprobs += update.logprobs
                ended.last = update
        engine.check()
    return found


def continuation(whole: Generate, text: Sequence[int], drawn: Sequence[int]) -> Generate:
    """`whole`, of one branch that begins with `text`, after it has drawn `drawn`."""
    grammar = whole.grammar
    if grammar is not None:
        grammar = replace(grammar, consumed=grammar.consumed + len(drawn))
    tokens = pack_tokens([*text, *drawn])
    return replace(whole, request=AGAIN, tokens=tokens, drawn=len(drawn), grammar=grammar)


def check_cuts(
    make: MakeEngine, ended: Ended, whole: Generate, text: Sequence[int], cuts: Sequence[int] = ()
) -> None:
    """`ended`, what `whole` draws after `text`, goes on after each of its tokens (or `cuts`) as if uncut.

    After the last token too, if its end was told apart; else that is refused.
    """
    for k in cuts or range(len(ended.tokens) + 1):
        engine = make()
        answers = play(engine, continuation(whole, text, ended.tokens[:k]))
        if k == len(ended.tokens) and ended.last.tokens:
            error = answers[AGAIN, -1].last.error
            assert error is not None
            assert error[2]["param"] in ("drawn", "grammar.consumed")
            continue
        rest = answers[AGAIN, 0]
        assert rest.tokens == ended.tokens[k:], f"cut after {k}"
        same_logprobs(rest.logprobs, ended.logprobs[k:])
        assert rest.last.finish == ended.last.finish
        assert rest.last.boundary == ended.last.boundary == len(text) + len(ended.tokens)
        assert rest.last.capsule == f"{AGAIN}.0"
        assert rest.last.cached_tokens + rest.last.prefill_tokens == len(text) + k


def same_logprobs(ours: Sequence[TokenLogprobs], theirs: Sequence[TokenLogprobs]) -> None:
    """They are the same but for the rounding of rows that are computed in other batches."""
    assert len(ours) == len(theirs)
    for (own, top), (other, others) in zip(ours, theirs, strict=True):
        assert own == pytest.approx(other, abs=1e-4)
        assert [token for token, _ in top] == [token for token, _ in others]
        assert [p for _, p in top] == pytest.approx([p for _, p in others], abs=1e-4)


def check_forks(
    make: MakeEngine,
    original: Engine,
    ended: Ended,
    whole: Generate,
    text: Sequence[int],
    sampling: Sampling = HOT,
) -> None:
    """Forks of the capsule that `ended` left in `original` draw what those of a rebuilt one draw.

    Rebuilt by a continuation, by a prefill, and by one that keeps it.
    """
    all_ = [*text, *ended.tokens]
    grammar = whole.grammar
    if grammar is not None:
        grammar = replace(grammar, consumed=grammar.consumed + len(ended.tokens))
    rebuild = Prefill(AGAIN, pack_tokens(all_), whole.salt, grammar=grammar, capsule=OWN_ID)
    ways: list[Command] = [rebuild, replace(rebuild, replaceable=True)]
    if ended.tokens:
        ways.append(continuation(whole, text, ended.tokens[: len(ended.tokens) // 2]))
    assert ended.last.capsule is not None
    expected = forks_of(original, ended.last.capsule, grammar, sampling)
    for way in ways:
        engine = make()
        (rest,) = play(engine, way).values()
        left = OWN_ID if isinstance(way, Prefill) else f"{AGAIN}.0"
        assert (rest.last.capsule, rest.last.boundary) == (left, len(all_))
        assert forks_of(engine, left, grammar, sampling) == expected
        if isinstance(way, Prefill):  # those that wait for it
            engine = make()
            engine.submit(way, "g")
            assert forks_of(engine, OWN_ID, grammar, sampling) == expected


def forks_of(
    engine: Engine, capsule: str, grammar: Grammar | None, sampling: Sampling
) -> list[Any]:
    """The answers of forks of `capsule`: free, and inside its text if there is one."""
    suffixes, limits = (b"", b"", pack_tokens([5, 9])), Limits(6)
    free, inside = f"{capsule} free", f"{capsule} inside"
    forks = [Fork(free, capsule, suffixes, limits, sampling)]
    if grammar is not None:
        own = Grammar("inherit")
        forks.append(Fork(inside, capsule, (b"", b""), Limits(40), sampling, grammar=own))
    answers = play(engine, *forks)
    return [
        (branch, ended.tokens, ended.last.finish, ended.last.boundary, ended.last.error)
        for name in (free, inside)
        for (request, branch), ended in sorted(answers.items())
        if request == name
    ]
