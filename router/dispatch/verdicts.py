"""Verdicts on prompts and forks: a row of the decision table each, and the reason for what was not there.

    exact            the prompt of an earlier request, again
    append           an earlier prompt and more
    message-append   the messages of an earlier request and more
    truncate         the beginning of an earlier prompt, or of a capsule (`at`)
    fork             a prompt that leaves an earlier one in its middle; several branches of a capsule
    restore          one branch that goes on from a capsule
    rebuild          computed anew: nothing was there, or a capsule was gone or too busy

Earlier prompts are remembered for a while, and compared within one scope alone: nobody learns what others
ask. Only the salts of one API key's tenant are compared with each other.
"""

from collections.abc import Sequence
from typing import Final, Literal, NamedTuple, TypeAlias

from mallee.protocol.hashing import Tokens
from mallee.protocol.ids import RequestId, Scope
from mallee.router.dispatch.effects import Deliver
from mallee.router.dispatch.jobs import (
    NO_MESSAGES,
    ForkJob,
    Job,
    Messages,
)
from mallee.router.dispatch.texts import tokens_of
from mallee.router.index.hashing import block_hashes

Verb: TypeAlias = Literal[
    "exact", "append", "message-append", "truncate", "fork", "restore", "rebuild"
]
Reason: TypeAlias = Literal[
    "never_seen",
    "input_changed",
    "evicted",
    "elsewhere",
    "prompt_cache_key_changed",
    "model_changed",
    "capsule_computed_again",
]
"""OpenAI's word where it has one. A `cache_salt` is a prompt_cache_key, a version of weights a model."""

MAX_NBYTES: Final = 16 << 20
_ALL_BLOCKS: Final = 64  # of a prompt are remembered, and after those
_STRIDE: Final = 16  # every 16th, and the last one
_KEY_NBYTES: Final = 120  # of one in a dictionary, about
_ENTRY_NBYTES: Final = 400


class Asked(NamedTuple):
    """A prompt as its gateway got it, with the label of the `weights` that serve."""

    tokens: Tokens
    scope: Scope
    owner: str = ""
    messages: Messages = NO_MESSAGES
    weights: str = ""


class Likeness(NamedTuple):
    """The part that a prompt has in common with the most like one before it."""

    request: RequestId
    same_tokens: int  # leading ones
    length: int  # of the earlier prompt
    same_messages: int
    num_messages: int  # of the earlier one
    has_system: bool
    is_other_salt: bool
    weights: str


class Verdict(NamedTuple):
    """The way a prompt was served. `reason`: why less was there than could have been, if it was less."""

    verb: Verb
    reason: Reason | None
    cached_tokens: int
    missed_tokens: int  # also in the earlier prompt, and computed
    reusable_tokens: int  # whole blocks in common with it
    likeness: Likeness | None = None
    changed_line: str = ""  # of the system prompt, if that is the reason


class Comparison(NamedTuple):
    """An accepted request's prompt beside the most like one before it."""

    job: Job
    asked: Asked | None  # None: a fork has no prompt
    likeness: Likeness | None
    block_size: int

    def verdict(self, first: Deliver, *, is_held_elsewhere: bool) -> Verdict:
        """Judge by the first update of branch 0. `is_held_elsewhere`: another worker had more of it."""
        cached, computed = first.prompt
        if self.asked is not None:
            return judge_prompt(
                self.asked,
                self.likeness,
                cached_tokens=cached,
                block_size=self.block_size,
                held_elsewhere=is_held_elsewhere,
            )
        job = self.job
        assert isinstance(job, ForkJob), "no other job has no prompt"
        return judge_fork(
            job.num_branches,
            is_cut=job.at is not None,
            is_recomputed=first.shard.how != "stay",
            cached_tokens=cached,
            missed_tokens=max(0, computed - len(job.suffixes[0])),
        )


class _Entry(NamedTuple):
    request: RequestId
    asked: Asked


class RecentPrompts:
    """The youngest prompts, of at most `max_nbytes`.

    Two generations: when the young one has half of the room the old one goes, as a whole. To forget prompts
    one by one costs as much as to remember them.
    """

    def __init__(self, block_size: int, max_nbytes: int = MAX_NBYTES) -> None:
        self._block_size = block_size
        self._max_nbytes = max_nbytes
        self._young: dict[int, _Entry] = {}  # by key, the youngest with these blocks
        self._old: dict[int, _Entry] = {}
        self._nbytes = 0  # of the young ones

    def compare(self, request: RequestId, job: Job, weights: str) -> Comparison:
        """Compare the prompt of `job`, if it has one; from now on it is an earlier one."""
        if isinstance(job, ForkJob):
            return Comparison(job, None, None, self._block_size)
        asked = Asked(tokens_of(job.tokens), job.salt, job.terms.owner, job.messages, weights)
        return Comparison(job, asked, self.take(request, asked), self._block_size)

    def take(self, request: RequestId, asked: Asked) -> Likeness | None:
        """Remember a prompt; what it has in common with earlier ones. None: not a block."""
        own = self._keys(asked.tokens, f"scope/{asked.scope}")
        shared = self._keys(asked.tokens, f"owner/{asked.owner}") if asked.owner else ()
        found = self._like(asked, own)
        if shared:
            other = self._like(asked, shared)
            if other is not None and (found is None or other.same_tokens > found.same_tokens):
                found = other
        keys = (*own, *shared)
        nbytes = _ENTRY_NBYTES + asked.tokens.nbytes + _KEY_NBYTES * len(keys)
        if self._nbytes + nbytes > self._max_nbytes // 2:
            self._old, self._young, self._nbytes = self._young, {}, 0
        if nbytes <= self._max_nbytes // 2:
            self._young.update(dict.fromkeys(keys, _Entry(request, asked)))
            self._nbytes += nbytes
        return found

    def _keys(self, tokens: Tokens, salt: str) -> tuple[int, ...]:
        hashes = block_hashes(tokens, self._block_size, salt=salt)
        if len(hashes) <= _ALL_BLOCKS:
            return tuple(hashes.tolist())
        later = hashes[_ALL_BLOCKS::_STRIDE].tolist()
        return (*hashes[:_ALL_BLOCKS].tolist(), *later, int(hashes[-1]))

    def _like(self, asked: Asked, keys: Sequence[int]) -> Likeness | None:
        young, old = self._young, self._old
        for key in reversed(keys):
            entry = young.get(key) or old.get(key)
            if entry is not None:
                break
        else:
            return None
        earlier = entry.asked
        is_own = earlier.scope == asked.scope or (asked.owner and earlier.owner == asked.owner)
        if not is_own:  # two hashes collide
            return None
        return Likeness(
            request=entry.request,
            same_tokens=_num_same(asked.tokens, earlier.tokens),
            length=len(earlier.tokens),
            same_messages=_num_same_messages(asked.messages, earlier.messages),
            num_messages=len(earlier.messages.digests),
            has_system=earlier.messages.has_system,
            is_other_salt=earlier.scope != asked.scope,
            weights=earlier.weights,
        )

    def check(self) -> None:
        """Raises AssertionError unless the bound holds for what is remembered."""
        for generation in (self._young, self._old):
            nbytes = sum(
                _ENTRY_NBYTES + entry.asked.tokens.nbytes
                for entry in {id(entry): entry for entry in generation.values()}.values()
            )
            assert nbytes + _KEY_NBYTES * len(generation) <= self._max_nbytes // 2, "too many bytes"


def _num_same(one: Tokens, other: Tokens) -> int:
    n = min(len(one), len(other))
    differs = one[:n] != other[:n]
    first = int(differs.argmax())
    return first if differs[first] else n


def _num_same_messages(one: Messages, other: Messages) -> int:
    num = 0
    for digest, earlier in zip(one.digests, other.digests, strict=False):
        if digest != earlier:
            break
        num += 1
    return num


def judge_prompt(
    asked: Asked,
    likeness: Likeness | None,
    *,
    cached_tokens: int,
    block_size: int,
    held_elsewhere: bool = False,
) -> Verdict:
    """The verdict on a prompt of which `cached_tokens` were there.

    `held_elsewhere`: a worker that was not chosen has more of it.
    """
    length = len(asked.tokens)
    if likeness is None:
        verb: Verb = "append" if cached_tokens else "rebuild"
        if cached_tokens:
            return Verdict(verb, None, cached_tokens, 0, 0)
        # A line in the first block leaves nothing by which the rest could be known again.
        changed = asked.messages.changed
        return Verdict(
            verb=verb,
            reason="input_changed" if changed else "never_seen",
            cached_tokens=0,
            missed_tokens=0,
            reusable_tokens=0,
            likeness=None,
            changed_line=changed,
        )

    def whole(num_tokens: int) -> int:
        # A worker computes a prompt's last token in any case.
        return min(num_tokens, length - 1) // block_size * block_size

    reusable, reason = whole(likeness.same_tokens), _loss(asked, likeness, held_elsewhere)
    missed = max(0, min(likeness.length, length) - cached_tokens)
    if cached_tokens >= reusable:
        is_hit = cached_tokens >= whole(likeness.length)
        missed, reason = (0, None) if is_hit else (missed, "input_changed")
    verb = _verb(asked, likeness) if cached_tokens else "rebuild"
    is_cause = reason == "input_changed" and not likeness.same_messages
    changed = asked.messages.changed if is_cause else ""
    return Verdict(
        verb=verb,
        reason=reason,
        cached_tokens=cached_tokens,
        missed_tokens=missed,
        reusable_tokens=reusable,
        likeness=likeness,
        changed_line=changed,
    )


def _loss(asked: Asked, likeness: Likeness, held_elsewhere: bool) -> Reason | None:
    """The reason that blocks in common with an earlier prompt were not there."""
    if likeness.is_other_salt:
        return "prompt_cache_key_changed"
    if likeness.weights != asked.weights:
        return "model_changed"
    return "elsewhere" if held_elsewhere else "evicted"


def _verb(asked: Asked, likeness: Likeness) -> Verb:
    same, length = likeness.same_tokens, len(asked.tokens)
    if same == length == likeness.length:
        return "exact"
    if 0 < likeness.num_messages == likeness.same_messages < len(asked.messages.digests):
        return "message-append"
    if same == likeness.length:
        return "append"
    return "truncate" if same == length else "fork"


def judge_fork(
    num_branches: int, *, is_cut: bool, is_recomputed: bool, cached_tokens: int, missed_tokens: int
) -> Verdict:
    """The verdict on branches of a capsule, or of its beginning (`is_cut`)."""
    if is_recomputed:
        return Verdict("rebuild", "capsule_computed_again", cached_tokens, missed_tokens, 0)
    verb: Verb = "truncate" if is_cut else "fork" if num_branches > 1 else "restore"
    return Verdict(verb, None, cached_tokens, 0, cached_tokens)


_ANTHROPIC: Final[dict[str, str]] = {"model_changed": "model_changed"}


def anthropic_reason(verdict: Verdict) -> str | None:
    """The type of Anthropic's `cache_miss_reason`; None where it has none."""
    if verdict.changed_line:
        return "system_changed"
    likeness = verdict.likeness
    if verdict.reason == "input_changed" and likeness is not None and likeness.num_messages:
        is_system = likeness.has_system and not likeness.same_messages
        return "system_changed" if is_system else "messages_changed"
    return _ANTHROPIC.get(verdict.reason or "")
