"""Commands from a gateway to a worker, and the frames that the worker answers with.

Commands travel in ordered batches, one batch in flight per gateway and host; answers come back as one
stream per gateway and host, with a frame per engine step that has updates for the gateway: `parcels`.
Token runs are raw little-endian u32 bytes: `pack_tokens`, `unpack_tokens`.
"""

from collections.abc import Sequence
from typing import Any, Final, Literal, TypeAlias

import msgspec
import numpy as np
from msgspec import structs

from mallee.protocol.errors import CodecError, InvalidParameter
from mallee.protocol.hashing import Tokens, as_tokens

ALL_BRANCHES = -1
"""Branch index of an update that is about every branch of its request."""

FinishReason: TypeAlias = Literal["stop", "length", "cancelled", "error", "budget", "condition"]

Kept: TypeAlias = Literal["", "kept", "refused"]
"""Whether a capsule that was to be pinned was; "" if it was not to be."""

GrammarKind: TypeAlias = Literal["json_schema", "json_object", "regex", "choice", "lark", "inherit"]

TokenLogprobs: TypeAlias = tuple[float, tuple[tuple[int, float], ...]]
"""The drawn token's log-probability, then (token id, log-probability) of the likeliest, falling."""

EndToken: TypeAlias = tuple[int, TokenLogprobs | None]
"""The token that ended a text, which is no part of it, and its log-probabilities if they were requested."""

MAX_LOGPROBS = 20
MAX_BRANCHES: Final = 4096  # of one command
MAX_LOGIT_BIAS = 1024
MAX_GRAMMAR_NBYTES = 64 << 10  # compiled in a tenth of a second
JSON_ESCAPES: Final = 'nrbtf\\"'
"""Behind a backslash in JSON under a grammar: each key and each text can be written in one way alone."""
JSON_SPACE: Final = r" |\n {0,24}"
"""Between the parts of a JSON text: models that may write any amount of it sometimes never end."""


def pack_tokens(tokens: Sequence[int] | Tokens) -> bytes:
    """`tokens` as raw little-endian u32."""
    return as_tokens(tokens).tobytes()


def unpack_tokens(raw: bytes) -> Tokens:
    """The read-only uint32 array over `raw`. Raises CodecError if it is not whole tokens long."""
    if len(raw) % 4:
        raise CodecError(f"token run of {len(raw)} bytes is not a multiple of 4", nbytes=len(raw))
    return np.frombuffer(raw, dtype="<u4")


class Sampling(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Sampling of next tokens. temperature 0 is greedy; top_k 0 and top_p 1 switch filters off.

    `seed` is always set (a gateway draws one if the client gave none): with (seed, position) the
    draw is a pure function of the logits, which makes replays and fail-over exact. min_p 0 and
    penalties 1, 0, 0 are off. `repetition_penalty` looks at prompt and answer, presence and frequency
    at the answer alone. `logit_bias` is (token id, addend), each id once. `logprobs` -1 is off, else
    how many of the likeliest tokens to report beside the drawn one.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int = -1

    def validate(self, vocab_size: int = 1 << 32) -> "Sampling":
        """Itself, if every field is in range. Raises InvalidParameter naming the first that isn't."""
        if not 0.0 <= self.temperature <= 100.0:  # also refuses NaN
            raise InvalidParameter("temperature", self.temperature, "give 0 (greedy) to 100")
        if self.top_k < 0:
            raise InvalidParameter("top_k", self.top_k, "give 0 (off) or a positive count")
        if not 0.0 < self.top_p <= 1.0:
            raise InvalidParameter("top_p", self.top_p, "give a share above 0 and at most 1")
        if not 0 <= self.seed < 1 << 64:
            raise InvalidParameter("seed", self.seed, "give 0 to 2**64 - 1")
        if not 0.0 <= self.min_p <= 1.0:
            raise InvalidParameter("min_p", self.min_p, "give a share from 0 (off) to 1")
        if not 0.0 < self.repetition_penalty <= 100.0:
            raise InvalidParameter(
                "repetition_penalty", self.repetition_penalty, "give more than 0, 1 for off"
            )
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2.0 <= getattr(self, name) <= 2.0:
                raise InvalidParameter(name, getattr(self, name), "give -2 to 2, 0 for off")
        if not -1 <= self.logprobs <= MAX_LOGPROBS:
            raise InvalidParameter("logprobs", self.logprobs, f"give -1 (off) to {MAX_LOGPROBS}")
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise InvalidParameter(
                "logit_bias", len(self.logit_bias), f"give at most {MAX_LOGIT_BIAS} tokens"
            )
        for token, bias in self.logit_bias:
            if token < 0 or not -100.0 <= bias <= 100.0:
                raise InvalidParameter("logit_bias", {token: bias}, "give ids with -100 to 100")
            if token >= vocab_size:
                raise InvalidParameter(
                    "logit_bias", token, f"token ids go from 0 to {vocab_size - 1}"
                )
        return self


class ReasoningBudget(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Bound on an answer's reasoning: after `max_tokens` of it without `close`, that is the next token.

    It begins with the answer, or with the token `open` as the answer's first or second; without that
    there is none. `close` comes later where a grammar lets it come only then.
    """

    max_tokens: int
    close: int
    open: int | None = None

    def validate(self, vocab_size: int) -> None:
        """Raises InvalidParameter if no branch can keep to it."""
        if self.max_tokens < 0:
            raise InvalidParameter("reasoning.max_tokens", self.max_tokens, "give 0 or more")
        for token in (self.close, 0 if self.open is None else self.open):
            if not 0 <= token < vocab_size:
                remedy = f"token ids go from 0 to {vocab_size - 1}"
                raise InvalidParameter("reasoning", token, remedy)


class Limits(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """End of a branch: after `max_tokens`, or at one of `stop_token_ids` (not part of the text).

    The model's own end-of-sequence ids count as stop ids unless `ignore_eos`. The first `min_tokens`
    tokens are no stop ids. A grammar (see `Grammar`) decides alone where its text ends. `reasoning`
    counts from the answer's first token on, wherever that was drawn.
    """

    max_tokens: int
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    reasoning: ReasoningBudget | None = None

    def validate(self, vocab_size: int) -> None:
        """Raises InvalidParameter if no branch can keep to them."""
        if self.max_tokens < 1:
            raise InvalidParameter("max_tokens", self.max_tokens, "give at least 1")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise InvalidParameter("min_tokens", self.min_tokens, "give 0 to max_tokens")
        if self.reasoning is not None:
            self.reasoning.validate(vocab_size)


class Grammar(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Form of an answer's text: `source` is a JSON schema, a regular expression, a Lark grammar,
    or a JSON list of strings (kind "choice"). For "json_object" it is empty: any JSON object.

    "inherit" is for forks: the branch goes on inside the text that the capsule's branch was cut in, its
    suffix being part of that text. A fork that names no grammar is free.

    The last `consumed` tokens of the command's `tokens` are text that the grammar has taken in already:
    the state after them is built again. For continuations and rebuilt capsules; a fork has its capsule's.
    """

    kind: GrammarKind
    source: str = ""
    consumed: int = 0

    def before(self, num_tokens: int) -> "Grammar | None":
        """As it was so many tokens before; None if that is outside of its text."""
        if self.consumed < num_tokens:
            return None
        return structs.replace(self, consumed=self.consumed - num_tokens)

    def validate(self) -> "Grammar":
        """Itself, if it is not too long, else InvalidParameter. The compiler finds other errors."""
        if self.consumed < 0:
            raise InvalidParameter("grammar.consumed", self.consumed, "give 0 or more tokens")
        nbytes = len(self.source.encode(errors="replace"))
        if nbytes > MAX_GRAMMAR_NBYTES:
            raise InvalidParameter(
                "grammar", self.source, f"{nbytes} bytes; give at most {MAX_GRAMMAR_NBYTES}"
            )
        return self


class Continuation(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The rest of an answer, from a boundary of it on: how its branch goes on drawing.

    The last `drawn` tokens of the text are those that it drew so far. `limits` are of the whole answer;
    its stream of draws is `branch_seed(sampling.seed, branch)`.
    """

    sampling: Sampling
    limits: Limits
    branch: int = 0
    drawn: int = 0

    def earlier(self, num_tokens: int) -> "Continuation | None":
        """As it was so many tokens before; None before the answer's first."""
        if num_tokens > self.drawn:
            return None
        return structs.replace(self, drawn=self.drawn - num_tokens)


class Share(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Share of a request in an engine that can't serve all requests at once.

    Tenants get computed tokens in proportion to `tenant_weight`, the sessions of each to `weight`; a
    session without a tenant stands for itself, and its weight is among the tenants'. Inside a session the
    highest `priority` (an agent's value of the branch) goes first.
    """

    session: str = ""
    weight: float = 1.0
    priority: float = 0.0
    tenant: str = ""
    tenant_weight: float = 1.0

    def validate(self) -> "Share":
        """Itself, if every field is in range. Raises InvalidParameter naming the first that isn't."""
        if not 0.0 < self.weight <= 1e6:
            raise InvalidParameter("weight", self.weight, "give more than 0, at most a million")
        if not 0.0 < self.tenant_weight <= 1e6:
            raise InvalidParameter(
                "tenant_weight", self.tenant_weight, "give more than 0, at most a million"
            )
        if not -1e9 <= self.priority <= 1e9:  # also refuses NaN
            raise InvalidParameter("priority", self.priority, "give a finite number")
        return self


class RetainSpan(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Retention of a text's full blocks before token `end`, and not in the span before.

    `priority` 1 to 100 is beyond what nobody wants retained (0), for `duration_s` after the last use.
    """

    end: int
    priority: int
    duration_s: float


END_OF_TEXT: Final = 1 << 62
"""`RetainSpan.end` of the last span, if that covers the answer too."""


def check_spans(spans: Sequence[RetainSpan]) -> None:
    """Raises InvalidParameter unless ends rise and priorities don't."""
    at, priority = 0, 100
    for span in spans:
        if (
            span.end < at
            or not 0 <= span.priority <= priority
            or not 0 <= span.duration_s < float("inf")
        ):
            raise InvalidParameter(
                *("retain", [span.end, span.priority, span.duration_s]),
                f"give an end from {at} on, a priority from 0 to {priority}, and seconds",
            )
        at, priority = span.end, span.priority


class Retained(msgspec.Struct, frozen=True, array_like=True):
    """Bytes that were to be retained at a branch's end, and that are: the first ones of its text."""

    asked_nbytes: int
    nbytes: int


class Holder(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A process that lends the KV of the first `num_tokens` of a command's text, at `address`.

    It is asked for blocks by their hashes; with `capsule` for that capsule there, which may have a salt of
    its own: for its record, and for its blocks by their places. `incarnation` is that of the life meant.
    """

    worker: str
    incarnation: int
    address: str
    num_tokens: int
    capsule: str = ""

    def first(self, num_tokens: int) -> "Holder":
        """It as the holder of at most so many tokens, not of a capsule."""
        num_tokens = min(num_tokens, self.num_tokens)
        return msgspec.structs.replace(self, num_tokens=num_tokens, capsule="")


MAX_HOLDERS: Final = 4
"""Of one command: they are asked one after another."""


def check_branches(name: str, num: int) -> None:
    """Raises InvalidParameter if the field `name` asks for too many branches at once, or for none."""
    if not 1 <= num <= MAX_BRANCHES:
        raise InvalidParameter(name, num, f"give 1 to {MAX_BRANCHES} branches")


def _check_holders(holders: Sequence[Holder]) -> None:
    """Raises InvalidParameter, if there are too many."""
    if len(holders) > MAX_HOLDERS:
        raise InvalidParameter("holders", len(holders), f"give at most {MAX_HOLDERS}")


MAX_PLACES: Final = 16
"""Of one command. Each may cost a worker as much memory as the KV of thousands of tokens."""


def _check_places(places: Sequence[int]) -> None:
    """Raises InvalidParameter, if there are too many, or one is before the first token."""
    if len(places) > MAX_PLACES:
        raise InvalidParameter("places", len(places), f"give at most {MAX_PLACES}")
    if min(places, default=1) < 1:
        raise InvalidParameter("places", min(places), "give counts of tokens, 1 or more")


def _check_consumed(grammar: Grammar | None, drawn: int, num_tokens: int) -> None:
    """Raises InvalidParameter if `grammar` can't have taken in what it is said to have."""
    if grammar is not None and not drawn <= grammar.consumed <= num_tokens:
        raise InvalidParameter(
            "grammar.consumed",
            grammar.consumed,
            f"give {drawn} to {num_tokens}, at least the drawn of the command's tokens",
        )


class _Command(msgspec.Struct, frozen=True, array_like=True, gc=False):
    pass


class Prefill(_Command, frozen=True, tag="prefill"):
    """Compute the KV of `tokens` once and keep it as capsule `capsule_id(request)`.

    The capsule holds the last logits, so its forks start without a forward pass. It lives until
    released, or for `ttl_s` seconds after its last use (0: no limit).

    A capsule whose worker was lost is built again by the tokens of its text: under its own id,
    `capsule`; inside the constrained text that its branch was cut in, `grammar`, whose last `consumed`
    tokens end `tokens`; and, if an answer had left it, `replaceable`: without logits or time to live, it
    stays while there is room. Its forks draw what forks of the lost one would have drawn, and so does
    the branch that it was, by `continuation`.

    `trace` is W3C's traceparent of the span that sent it; "": nobody wants to see it.

    KV that `holders` have is fetched from them where that is cheaper; what does not arrive is computed.
    From a holder that names a capsule its state comes too: this one is then exactly that one.

    `places` are boundaries of the text, by its tokens up to there, from which others are likely to go on: a
    model with recurrent layers leaves a state at the last end of a block before each, while it has room.
    """

    request: str
    tokens: bytes
    salt: str = ""
    ttl_s: float = 0.0
    share: Share = Share()
    grammar: Grammar | None = None
    capsule: str = ""
    replaceable: bool = False
    continuation: Continuation | None = None
    retain: tuple[RetainSpan, ...] = ()
    holders: tuple[Holder, ...] = ()
    trace: str = ""
    places: tuple[int, ...] = ()

    def validate(self, num_tokens: int) -> "Prefill":
        """Itself, if its fields fit `tokens`, which are `num_tokens`. Raises InvalidParameter."""
        if not 0 <= self.ttl_s < float("inf"):
            raise InvalidParameter("ttl_s", self.ttl_s, "give seconds, 0 for no limit")
        if self.replaceable and self.ttl_s:
            raise InvalidParameter("ttl_s", self.ttl_s, "a replaceable capsule has none; give 0")
        _check_consumed(self.grammar, 0, num_tokens)
        _check_holders(self.holders)
        _check_places(self.places)
        if self.continuation is not None and not 0 <= self.continuation.drawn < num_tokens:
            drawn = self.continuation.drawn
            raise InvalidParameter(
                "continuation.drawn",
                drawn,
                f"give 0 to {num_tokens - 1}, the tokens after the first",
            )
        return self


class Generate(_Command, frozen=True, tag="generate"):
    """Continue `tokens` n times: one prefill, then n branches.

    Branch i draws with `branch_seed(seed, first_branch + i)`: a request may be a part of a larger one.

    A branch that was cut off on another worker goes on as if nothing had happened: its last `drawn`
    tokens are those that it drew there. Limits (`max_tokens` is that of the whole answer), `min_tokens`,
    penalties and grammar count them as drawn; updates report new tokens only, and `prefill_tokens` and
    `cached_tokens` count every token of `tokens`. It goes alone (n is 1), and `first_branch` says which
    one of its request it was.

    With `keep_s` the capsules that its branches leave are pinned, each until released or for so long after
    its last use (0: no limit). One for which there is no room is not left, and the branch's end says so.

    `holders`, `trace` and `places` as with `Prefill`.

    `prompt_logprobs`: the first update of each branch has the log-probabilities of all tokens of the prompt
    but the first, with so many of the likeliest; -1: none. All of the prompt is computed for that.
    """

    request: str
    tokens: bytes
    limits: Limits
    sampling: Sampling = Sampling()
    n: int = 1
    salt: str = ""
    first_branch: int = 0
    share: Share = Share()
    grammar: Grammar | None = None
    drawn: int = 0
    keep_s: float | None = None
    retain: tuple[RetainSpan, ...] = ()
    holders: tuple[Holder, ...] = ()
    trace: str = ""
    places: tuple[int, ...] = ()
    prompt_logprobs: int = -1

    def validate(self, num_tokens: int) -> "Generate":
        """Itself, if its fields fit `tokens`, which are `num_tokens`. Raises InvalidParameter."""
        if not 0 <= self.drawn < max(1, num_tokens):
            raise InvalidParameter(
                "drawn", self.drawn, f"give 0 to {num_tokens - 1}, the tokens after the first"
            )
        if self.drawn and self.drawn >= self.limits.max_tokens:
            raise InvalidParameter(
                "drawn", self.drawn, f"all of max_tokens={self.limits.max_tokens} are drawn already"
            )
        if not -1 <= self.prompt_logprobs <= MAX_LOGPROBS:
            remedy = f"give -1 (off) to {MAX_LOGPROBS}"
            raise InvalidParameter("prompt_logprobs", self.prompt_logprobs, remedy)
        if self.n != 1 and self.drawn:
            raise InvalidParameter("n", self.n, "give 1: branches are continued one by one")
        _check_consumed(self.grammar, self.drawn, num_tokens)
        _check_holders(self.holders)
        _check_places(self.places)
        return self


class Fork(_Command, frozen=True, tag="fork"):
    """Continue capsule `capsule` once per suffix; nothing of the capsule is computed again.

    Branch i draws as with `Generate`. With `at`, the branches continue the capsule's first `at` tokens
    instead of all: no more than a block of them is computed again, or, where sliding window layers have
    given up what is read there, all from the last place that they can go on from. The capsule may still
    be computing (a `Prefill` under way): its forks start as soon as the tokens they continue are computed.
    `keep_s` as with `Generate`, `trace` as with `Prefill`.

    With `resumes` its one branch, without a suffix, goes on as the very branch that the capsule was taken
    from: sampling, stream of draws, limits and grammar are the capsule's; of the command's limits only
    `max_tokens` counts, as tokens still to draw (0: those that are left). With `at` it goes on from an
    earlier token of its answer.

    So many other workers are about to borrow the capsule, `loans`: each gets it at once, without waiting for
    the end of a step that these branches are in.
    """

    request: str
    capsule: str
    suffixes: tuple[bytes, ...]
    limits: Limits
    sampling: Sampling = Sampling()
    first_branch: int = 0
    share: Share = Share()
    grammar: Grammar | None = None
    at: int | None = None
    resumes: bool = False
    keep_s: float | None = None
    retain: tuple[RetainSpan, ...] = ()
    loans: int = 0
    trace: str = ""


class Demote(_Command, frozen=True, tag="demote"):
    """Move a capsule down to `tier` (1 host memory, 2 disk): its device blocks are only cache from then on.

    The reply comes when it is there; for disk, when it is durable.
    """

    request: str
    capsule: str
    tier: int


class Promote(_Command, frozen=True, tag="promote"):
    """Bring a capsule back to the device; what can't be read is computed again.

    The reply comes when it is there. A fork does as much by itself.
    """

    request: str
    capsule: str
    share: Share = Share()


class Prioritize(_Command, frozen=True, tag="prioritize"):
    """Change the priority of a request, or of one of its branches, from the next step on."""

    request: str
    priority: float
    branch: int | None = None


class Cancel(_Command, frozen=True, tag="cancel"):
    """End a request, or one of its branches, at the next committed boundary."""

    request: str
    branch: int | None = None


class Inject(_Command, frozen=True, tag="inject"):
    """Have a running branch of `of` go on after `tokens`, as if it had drawn them, at its next boundary.

    That is the next step, if the branch draws; else its first drawn token, or its next one after a
    preemption. Until then they wait behind what was injected before; with `replaces` that is dropped. They
    count against `max_tokens`, and leave one to draw. The update that has them names `request`, and a
    `CapsuleReply` says why there is none, unless the branch ends before.
    """

    request: str
    of: str
    branch: int
    tokens: bytes
    replaces: bool = False


class Release(_Command, frozen=True, tag="release"):
    """Forget a capsule. Live branches forked from it go on. Nothing is answered: see `Delete`."""

    capsule: str


class Capture(_Command, frozen=True, tag="capture"):
    """Keep the state of a running branch as capsule `capsule_id(request)`, at its next committed boundary.

    That is now, if the branch draws; else its first drawn token, or its next one after a preemption. The
    branch goes on as if nothing had happened; no KV is copied, but its next append copies the block that
    it shares with the capsule in part. Answered by a `CapsuleReply`, like all commands about capsules.
    """

    request: str
    of: str
    branch: int = 0
    ttl_s: float = 0.0


class Rewind(_Command, frozen=True, tag="rewind"):
    """Keep the first `at` tokens of `capsule` as a capsule of their own, `capsule_id(request)`.

    `capsule` stays as it is. No KV is copied, and what continues the new one computes at most a block.
    """

    request: str
    capsule: str
    at: int
    ttl_s: float = 0.0


class Pin(_Command, frozen=True, tag="pin"):
    """Keep `capsule` until it is released, or unused for `ttl_s` (0: no limit); or no more.

    Not `is_pinned`, it stays while there is room, without its logits.
    """

    request: str
    capsule: str
    is_pinned: bool = True
    ttl_s: float = 0.0


class Inspect(_Command, frozen=True, tag="inspect"):
    """Tell the status of `capsule`; that is no use of it."""

    request: str
    capsule: str


class Delete(_Command, frozen=True, tag="delete"):
    """Forget `capsule`, as `Release` does; live branches forked from it go on.

    The reply comes when its record is gone from disk, and has the capsule as it was: it does not come back
    with the worker's next life. If the disk fails, nothing has changed. The prefill of one that is still
    computing is cancelled.
    """

    request: str
    capsule: str


class Cut(_Command, frozen=True, tag="cut"):
    """End a branch, if it runs, and leave the first `at` tokens of its text and `residue` as its capsule.

    For an answer of which the client saw the beginning alone (up to a stop string): its capsule,
    `capsule_id(request, branch)`, has the text that was seen, also if the branch was over already and had
    left more. Nothing is answered.
    """

    request: str
    branch: int
    at: int
    residue: bytes = b""


CapsuleCommand: TypeAlias = Capture | Rewind | Pin | Inspect | Demote | Promote | Delete
"""Commands that a `CapsuleReply` answers."""

Command: TypeAlias = (
    Prefill | Generate | Fork | Prioritize | Cancel | Inject | Release | Cut | CapsuleCommand
)


def traced(command: Command, trace: str) -> Command:
    """`command` with the traceparent of the span that sends it, if it is one that computes."""
    if isinstance(command, Prefill | Generate | Fork):
        return structs.replace(command, trace=trace)
    return command


class Update(msgspec.Struct, frozen=True, array_like=True):
    """New tokens of one branch, and at its end the reason.

    `cached_tokens` (prompt tokens whose KV was already there) and `prefill_tokens` (prompt tokens
    computed for this branch; a prefix computed once for n branches is counted on branch 0) are set
    from the branch's first update on. `capsule` names the state the branch left, if it left one.
    `boundary` counts the tokens of its text, prompt and answer, with every finish but "error". `error`
    is `MalleeError.to_wire()` and comes with finish "error". branch ALL_BRANCHES is every branch of the
    request (refused, or ended before it forked).
    `logprobs` has one entry per token if they were requested, else it is empty. `position` counts the
    tokens that the branch drew for this request before `tokens`; -1: not told. `kept`: if its capsule was
    to be pinned, whether it was. `retained` comes with the end of a branch that asked for retention. `drafts`
    counts tokens that were drafted for the branch since its last update, and those of them that it drew; None
    if none were. `injected` is the `Inject` that `tokens` are of: they
    were not drawn, and have log-probability 0. `end_token` comes with finish "stop", unless a grammar's text
    is complete; `prompt_logprobs` as `Generate` asks for them. `resampled`: the branch goes on from
    tokens that it drew on another worker, on an engine whose draws are not those of an undisturbed answer.
    """

    request: str
    branch: int
    tokens: tuple[int, ...] = ()
    finish: FinishReason | None = None
    cached_tokens: int = 0
    prefill_tokens: int = 0
    capsule: str | None = None
    boundary: int = 0
    error: tuple[str, str, dict[str, Any]] | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    position: int = -1
    kept: Kept = ""
    retained: Retained | None = None
    drafts: tuple[int, int] | None = None
    injected: str = ""
    end_token: EndToken | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    resampled: bool = False

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    def after(self, position: int) -> "Update | None":
        """The update without its tokens before `position`, which were told already. None: all was told."""
        num_told = position - self.position
        if num_told >= len(self.tokens) and self.finish is None:
            return None
        tokens, logprobs = self.tokens[num_told:], self.logprobs[num_told:]
        return structs.replace(self, tokens=tokens, logprobs=logprobs, position=position)


class CapsuleStatus(msgspec.Struct, frozen=True, array_like=True):
    """A capsule on its worker. Bytes of blocks that other capsules or branches hold too are `shared_nbytes`.

    `ttl_s`: seconds left unless it is used; None: no limit. `drawn`: tokens of its text that the branch
    had drawn which it was taken from; None: it is no branch's. `tier`: device, host or disk, the highest that
    has all of its KV; "none": some of it is gone, to be computed again. `computed`: tokens that are there of
    one that is still computing; None: it is complete. `aligned`: the last place in it at which prompts that
    begin with its text may go on, of a model that can do so only at some; 0: not told.
    """

    capsule: str
    boundary: int
    nbytes: int
    shared_nbytes: int
    is_pinned: bool
    ttl_s: float | None = None
    drawn: int | None = None
    tier: str = "device"
    computed: int | None = None
    aligned: int = 0


class CapsuleReply(msgspec.Struct, frozen=True, array_like=True):
    """The answer to the command `request` about a capsule: the capsule as it is now, or an error.

    Of one that is deleted: as it was.
    """

    request: str
    status: CapsuleStatus | None = None
    error: tuple[str, str, dict[str, Any]] | None = None


class Frame(msgspec.Struct, frozen=True, array_like=True):
    """All updates of one engine step for one gateway, and replies to its commands about capsules."""

    step: int
    updates: tuple[Update, ...]
    replies: tuple[CapsuleReply, ...] = ()
