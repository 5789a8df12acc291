"""Every error Mallee raises on purpose, as one tree.

    MalleeError
    |- BadRequest               the caller can fix it                                    (400)
    |  |- InvalidParameter        a field has a value it can't have
    |  |  `- ThreadMismatch         a field of a thread's beginning is given again and otherwise
    |  |- ContextLengthExceeded   prompt and answer don't fit the model's window
    |  |- InvalidGraph            a graph of calls can't run as it is
    |  |  `- GraphContextExceeded   a prefix and its largest branch don't fit the window
    |  |- KVBudgetExceeded        it does not fit the whole KV memory of a worker
    |  |- KVMemoryExceeded        it does not fit the KV memory of any worker that may take it
    |  |- QuotaTooSmall           it is more than its API key may ever have at once
    |  |- GrammarFailed           an answer can't go on under its grammar
    |  |- NotSupported            no engine that may take it can do it
    |  |- CapsuleStale            it was made by weights that have been replaced            (409)
    |  |- CapsuleComputing        its prefill has not ended, and only forks can go ahead    (409)
    |  |- WeightsChanged          an answer can't go on: its weights have been replaced     (409)
    |  |- SessionClosed           an answer's session was closed                           (409)
    |  |- SessionTaken            there is a session of the name that a new one is to have (409)
    |  |- Superseded              other tokens took the place of those to be injected      (409)
    |  |- BudgetSpent             nothing is left of the budget that bounds a request      (409)
    |  |- SlowReader              the client doesn't read its answer                       (408)
    |  |- Unauthorized            no key, or none that is valid                            (401)
    |  `- Forbidden               the key has not the right                                (403)
    |- NotFound                 the named thing is not there                             (404)
    |  |- UnknownModel
    |  |- UnknownCapsule
    |  |- ThreadNotFound          no state of that answer is stored: send the whole conversation
    |  |- UnknownText             the text of a capsule is not known any more
    |  |- UnknownRequest          no such request is remembered: it is too old, or never was
    |  |- UnknownBranch           no such branch runs: it is over, or never was
    |  |- CapsuleAbandoned        it was given up before it was computed
    |  `- CapsuleLost             it went with its worker, and can't be computed again         (410)
    |- Unavailable              right request, wrong moment                              (503)
    |  |- LookupIncomplete        it may be known at another gateway, which has not answered
    |  |- StoreAway               the gateways' store does not answer
    |  |- StoreFull               it takes no more
    |  |- OtherLayout             another version of Mallee has stored it
    |  |- Unreadable              a stored value that no gateway has stored so
    |  |- Contended               others change it all the time
    |  |- PeerSilent              the gateway that has it does not answer
    |  |- NoWorker                no worker serves this model now
    |  |- WorkerLost              the worker died with the request on it
    |  |- CorruptLoan            KV that another worker lent is not what was sent
    |  |- PoisonRequest           workers died of the request, it seems
    |  |- PoolExhausted           no KV blocks left, and nothing may be evicted
    |  |- DeviceMemoryExhausted   a step needs more of the device's memory than there is
    |  |- CapsulesFull            as many blocks are kept in capsules as may be kept
    |  |- TierFull                host memory or disk has no room that may be given up
    |  |- LoansFull               a worker lends to as many others as it may
    |  |- Saturated               every worker that may take it is at its limit
    |  |- Overloaded              as many requests wait as may wait
    |  |- DeadlineExceeded        no worker took the request in time
    |  |- QuotaExceeded           a limit of the API key                                   (429)
    |  `- QueueFull               too much is waiting already                            (429)
    |     `- TenantQueueFull         too much of one tenant
    |- CallbackFailed           a URL that the request names was called in vain          (503)
    |- ModelError               a checkpoint that can't be served                        (500)
    |  |- ModelNotFound
    |  |- UnsupportedModel
    |  `- WeightsMismatch         names or shapes missing, unexpected, different
    |- StorageError             durable storage of KV did not do what was asked              (503)
    |  |- StorageBusy             another live process has the volume open
    |  |- StorageFull             the disk or a budget has no room
    |  |- StorageFailed           the file system refused: operation, file, errno
    |  |- BlocksMissing           blocks are not stored, or not any more
    |  `- CorruptStorage          bytes are not what was written, or some are gone          (500)
    |     `- CorruptExport          of an exported capsule                                    (400)
    |- IncompatibleCapsule      made by another model, version or layout: names the fields  (409)
    |- CodecError               bytes that are not a message of ours                     (400)
    |- ConfigError              settings that contradict each other                      (500)
    `- InternalError            our bug, reported without taking the service down        (500)
       `- CorruptKV                KV memory is not what it was written as

Errors carry data; the text is built from it and names the remedy. `to_wire` and `from_wire` carry an
error over a process boundary with its type. `status` is the nearest HTTP status, which every layer
may carry and only the HTTP API interprets.
"""

import math
import reprlib
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Final

MAX_SHOWN: Final = 80  # characters of a client's value in a message


class _Shown(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 3
        self.maxlist = self.maxtuple = self.maxdict = self.maxset = self.maxfrozenset = 16
        self.maxstring = self.maxother = MAX_SHOWN

    def repr_int(self, x: int, _: int) -> str:
        bits = x.bit_length()  # writing out a very long one takes seconds, and Python refuses it
        return repr(x) if bits <= 4 * MAX_SHOWN else f"a number of {bits} bits"


_shown = _Shown()


def shown(value: object) -> str:
    """`value` as Python writes it, the beginning of long ones: in short time, however long it is."""
    text = _shown.repr(value)
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "..."


def nearest(name: str, known: Iterable[str], otherwise: str = "", prefix: str = "") -> str:
    """The end of a sentence that refuses `name`: the one of `known` that was meant, if one is near."""
    from difflib import get_close_matches

    found = get_close_matches(name[:MAX_SHOWN], [*known], 1)
    return f"the nearest is `{prefix}{found[0]}`" if found else otherwise


class MalleeError(Exception):
    """Base of every error raised on purpose. `fields` holds the data the message was built from.

    Where more is needed than there can ever be, no later moment is a better one: the status of such an
    error is 400, though that of its type is 503.
    """

    status: int = 500
    code: ClassVar[str] = "internal_error"

    def __init__(self, message: str, **fields: Any) -> None:
        super().__init__(message)
        self.message = message
        self.fields: dict[str, Any] = fields
        needed, most = fields.get("needed", 0), fields.get("limit", fields.get("total", 0))
        if self.status == 503 and needed > most > 0:
            self.status = 400

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self).code, self.message, self.fields))

    @classmethod
    def with_message(cls, message: str, **fields: Any) -> "MalleeError":
        """An error of this type with a text that is already written (by another process)."""
        error = cls.__new__(cls)
        MalleeError.__init__(error, message, **fields)
        return error

    @property
    def retry_after_s(self) -> float | None:
        """Seconds after which it is worth to try again, if that is known."""
        told = self.fields.get("retry_after_s")
        return None if told is None else float(told)

    @property
    def client_message(self) -> str:
        """The text for clients: without names of workers, and without what went wrong inside of them."""
        return self.message

    def to_wire(self) -> tuple[str, str, dict[str, Any]]:
        """`(code, message, fields)`: plain data that `from_wire` turns back into this type."""
        return (self.code, self.message, self.fields)


class BadRequest(MalleeError):
    status = 400
    code = "invalid_request"


class InvalidParameter(BadRequest):
    code = "invalid_parameter"

    def __init__(self, param: str, value: object, remedy: str) -> None:
        param, text = param[:MAX_SHOWN], shown(value)
        super().__init__(f"{param}={text}: {remedy}", param=param, value=text, remedy=remedy)


class ContextLengthExceeded(BadRequest):
    code = "context_length_exceeded"

    def __init__(self, prompt_tokens: int, max_tokens: int, limit: int) -> None:
        # A client's `max_tokens` may be a number that Python refuses to write out.
        asked, total = shown(max_tokens), shown(prompt_tokens + max_tokens)
        super().__init__(
            f"prompt {prompt_tokens} + max_tokens {asked} = {total}"
            f" > {limit} tokens that this model serves; shorten the prompt or ask for fewer tokens",
            prompt_tokens=prompt_tokens,
            max_tokens=max_tokens,
            limit=limit,
            param="prompt",
        )


class InvalidGraph(BadRequest):
    """The text names the node, or the edge as `u -> v`."""

    code = "invalid_graph"

    def __init__(self, why: str) -> None:
        super().__init__(why, param="nodes")


class GraphContextExceeded(InvalidGraph):
    """All that goes on from `prefill` needs so much; `node` has the largest branch, if there is one."""

    code = "graph_context_exceeded"

    def __init__(
        self, prefill: str, prefix: int, node: str, branch: int, headroom: int, n_ctx: int
    ) -> None:
        total = prefix + branch + headroom
        at = f" ({node})" if node else ""
        BadRequest.__init__(
            self,
            f"prefix {shown(prefix)} ({prefill}) + largest branch {shown(branch)}{at} + headroom {headroom} ="
            f" {shown(total)} > n_ctx {n_ctx}; shorten the texts, or lower max_tokens or max_items",
            param="nodes",
            prefill=prefill,
            prefix=prefix,
            node=node,
            branch=branch,
            headroom=headroom,
            n_ctx=n_ctx,
        )


class KVBudgetExceeded(BadRequest):
    """A branch needs `needed` blocks, more than the `total` of a worker."""

    code = "kv_budget_exceeded"

    def __init__(
        self, prefix: int, branch: int, headroom: int, needed: int, total: int, block_size: int
    ) -> None:
        super().__init__(
            f"prefix {prefix} + branch {branch} + headroom {headroom} ="
            f" {prefix + branch + headroom} tokens need {needed} KV blocks of {block_size}, of which"
            f" this worker has {total}; ask for fewer tokens, or start it with more blocks",
            param="prompt",
            prefix=prefix,
            branch=branch,
            headroom=headroom,
            needed=needed,
            total=total,
            block_size=block_size,
        )


class KVMemoryExceeded(BadRequest):
    """A row needs `needed` blocks; the largest worker that may take it has `largest` in all."""

    code = "kv_memory_exceeded"

    def __init__(self, needed: int, largest: int, block_size: int) -> None:
        super().__init__(
            f"this request needs {needed} KV blocks of {block_size} tokens, the largest worker that"
            f" may take it has {largest} in all; split the prompt, ask for fewer tokens, or give"
            " workers more KV memory",
            param="prompt",
            needed=needed,
            largest=largest,
            block_size=block_size,
        )


class ThreadMismatch(InvalidParameter):
    """A field of a thread's beginning, given again and otherwise."""

    code = "thread_fingerprint_mismatch"

    def __init__(self, param: str, value: Any) -> None:
        super().__init__(
            param, value, "the thread has another one; leave it out, or begin a thread"
        )


class QuotaTooSmall(BadRequest):
    """A request needs `needed` of `what`, of which its API key may never have more than `limit`."""

    code = "quota_too_small"

    def __init__(self, what: str, needed: int, limit: int) -> None:
        super().__init__(
            f"this request needs {shown(needed)} {what}, and its API key may have {limit} at most; ask for"
            " fewer, or have the key's limit raised",
            what=what,
            needed=needed,
            limit=limit,
        )


class GrammarFailed(BadRequest):
    """An answer could not go on under its grammar."""

    code = "grammar_failed"

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"the answer can't go on under its grammar ({reason}); allow more, or make it simpler",
            param="grammar",
            reason=reason,
        )


class NotSupported(BadRequest):
    """`capability`: the first of what the engines lack; a name of `protocol.capabilities`."""

    code = "not_supported"

    def __init__(self, capability: str, remedy: str) -> None:
        super().__init__(
            f"the engines of this service lack {capability!r}: {remedy}", capability=capability
        )


class CapsuleStale(BadRequest):
    """`made_by` and `serving` are labels of weight versions."""

    status = 409
    code = "capsule_stale"

    def __init__(self, capsule: str, made_by: str, serving: str) -> None:
        super().__init__(
            f"capsule {shown(capsule)} was made by weights {shown(made_by)}, and {shown(serving)} serve now;"
            " create it again",
            param="capsule",
            capsule=capsule,
            made_by=made_by,
            serving=serving,
        )


class WeightsChanged(BadRequest):
    """The weights `began` of an answer are served no more, but `serving`; it ends where it is."""

    status = 409
    code = "weights_changed"

    def __init__(self, began: str, serving: str) -> None:
        super().__init__(
            f"the answer began with weights {shown(began)}, and {shown(serving)} serve now; send the"
            " request again, or give running answers more time (drain_s) when weights change",
            began=began,
            serving=serving,
        )


class SessionClosed(BadRequest):
    status = 409
    code = "session_closed"

    def __init__(self) -> None:
        super().__init__("the session was closed while this answer was under way")


class SessionTaken(BadRequest):
    status = 409
    code = "session_taken"

    def __init__(self, name: str) -> None:
        super().__init__(
            f"there is a session {shown(name)}; give another name", param="session", session=name
        )


class Superseded(BadRequest):
    status = 409
    code = "superseded"

    def __init__(self) -> None:
        super().__init__("a later inject with mode=replace took the place of these tokens")


class BudgetSpent(BadRequest):
    status = 409
    code = "budget_spent"

    def __init__(self, resource: str, why: str) -> None:
        super().__init__(
            f"the budget that bounds this request has no {resource} for it: {why}",
            resource=resource,
        )


class SlowReader(BadRequest):
    status = 408
    code = "slow_reader"

    def __init__(self, waiting: int, seconds: float) -> None:
        super().__init__(
            f"{waiting} tokens and log-probabilities of the answer wait to be read, and none was in"
            f" {seconds:.0f} s: it was given up; read streams as they come",
            waiting=waiting,
            seconds=seconds,
        )


class Unauthorized(BadRequest):
    """Carries nothing of what was sent."""

    status = 401
    code = "invalid_api_key"

    def __init__(self) -> None:
        super().__init__("give a valid API key as 'Authorization: Bearer KEY'")


class Forbidden(BadRequest):
    status = 403
    code = "forbidden"


class NotFound(MalleeError):
    status = 404
    code = "not_found"


class UnknownModel(NotFound):
    code = "model_not_found"

    def __init__(self, model: str, served: Sequence[str]) -> None:
        super().__init__(
            f"model {shown(model)} is not served here; served: {', '.join(served) or 'none'}",
            param="model",
            model=model[:MAX_SHOWN],
            served=list(served),
        )


class UnknownCapsule(NotFound):
    code = "capsule_not_found"

    def __init__(self, capsule: str) -> None:
        super().__init__(
            f"capsule {shown(capsule)} is not held by any worker (expired, deleted, or its worker was"
            " restarted); create it again",
            capsule=capsule,
        )


class ThreadNotFound(NotFound):
    """No state of that answer: clients send the whole conversation again."""

    code = "thread_not_found"

    def __init__(self, name: str) -> None:
        super().__init__(
            f"no thread is stored here up to {shown(name)}: it was forgotten, is of another scope, or never"
            ' was; send the whole conversation with thread: {"type": "create"}',
            param="thread.previous_message_id",
        )


class UnknownText(NotFound):
    code = "text_not_known"

    def __init__(self, capsule: str) -> None:
        super().__init__(
            f"the text of capsule {shown(capsule)} is not known any more; the capsule can still be forked",
            capsule=capsule,
        )


class UnknownRequest(NotFound):
    code = "request_not_found"

    def __init__(self, request: str) -> None:
        super().__init__(
            f"request {shown(request)} is not known: it was never made, is of another scope, began at another"
            " gateway, or is too old",
            request=request,
        )


class UnknownBranch(NotFound):
    code = "branch_not_found"

    def __init__(self, request: str, branch: int) -> None:
        super().__init__(
            f"branch {shown(branch)} of request {shown(request)} is not running: it is over, or never"
            " was; an answer that has ended names the capsule that it left",
            request=request,
            branch=branch,
        )


class CapsuleAbandoned(NotFound):
    code = "capsule_abandoned"

    def __init__(self, capsule: str) -> None:
        super().__init__(
            f"capsule {capsule!r} was cancelled before the tokens to continue were computed; create it"
            " again",
            capsule=capsule,
        )


class CapsuleComputing(BadRequest):
    status = 409
    code = "capsule_computing"

    def __init__(self, capsule: str) -> None:
        super().__init__(
            f"capsule {shown(capsule)} is still computing: it can be forked, looked at and deleted; for"
            " anything else wait until its status is ready",
            param="capsule",
            capsule=capsule,
        )


class CapsuleLost(NotFound):
    status = 410
    code = "capsule_lost"

    def __init__(self, capsule: str, reason: str) -> None:
        super().__init__(
            f"capsule {capsule!r} was lost and can't be computed again: {reason}; create it again",
            capsule=capsule,
            reason=reason,
        )


class Unavailable(MalleeError):
    status = 503
    code = "unavailable"


class LookupIncomplete(Unavailable):
    """The named thing is not known here; `why` it can't be said that no other gateway knows it."""

    code = "lookup_incomplete"

    def __init__(self, why: str) -> None:
        super().__init__(
            f"it is not known at this gateway, and {why}; retry in 1 s", why=why, retry_after_s=1.0
        )


class StoreAway(Unavailable):
    """The store does not answer, and this gateway does not know the thing."""

    code = "store_away"

    def __init__(self, why: str) -> None:
        super().__init__(
            f"the gateways' store can't be reached: {why}; retry in 1 s", retry_after_s=1.0
        )


class StoreFull(Unavailable):
    """The broker keeps no more values."""

    code = "store_full"


class OtherLayout(Unavailable):
    """A value that another version of Mallee has stored."""

    code = "stored_by_another_version"

    def __init__(self, bucket: str, found: int, own: int) -> None:
        super().__init__(
            f"it was stored in {bucket!r} with layout {found}, and this gateway reads layout {own}:"
            " update the gateways that are older",
            bucket=bucket,
            found=found,
            own=own,
        )


class Unreadable(Unavailable):
    """A stored value that no gateway has stored so."""

    code = "stored_value_unreadable"

    def __init__(self, bucket: str) -> None:
        super().__init__(
            f"its value in {bucket!r} can't be read: another program has changed it", bucket=bucket
        )


class Contended(Unavailable):
    """Others change a value all the time."""

    code = "changed_meanwhile"

    def __init__(self, name: str, num: int) -> None:
        super().__init__(
            f"{name} was changed {num} times by others meanwhile; retry in 1 s",
            retry_after_s=1.0,
        )


class PeerSilent(Unavailable):
    """The gateway that has it does not answer."""

    code = "gateway_silent"

    def __init__(self, why: str) -> None:
        super().__init__(
            f"the gateway that runs this has not answered: {why}; retry in 1 s", retry_after_s=1.0
        )


class NoWorker(Unavailable):
    code = "no_worker"

    def __init__(self, reason: str) -> None:
        super().__init__(f"no worker can take this request: {reason}; retry shortly", reason=reason)


class WorkerLost(Unavailable):
    code = "worker_lost"

    def __init__(self, worker: str, reason: str) -> None:
        super().__init__(
            f"worker {worker} was lost before the answer ended ({reason}); send the request again",
            worker=worker,
            reason=reason,
        )

    @property
    def client_message(self) -> str:
        return "the worker was lost before the answer ended; send the request again"


class CorruptLoan(Unavailable):
    """Block `place` of a loan has not the checksum that it was sent with."""

    code = "corrupt_loan"

    def __init__(self, worker: str, place: int) -> None:
        super().__init__(
            f"block {place} that worker {worker} lent is not what was sent; it is computed again, look"
            " after the network if this goes on",
            worker=worker,
            place=place,
        )

    @property
    def client_message(self) -> str:
        return "KV that another worker lent is not what was sent; send the request again"


class PoisonRequest(Unavailable):
    """`workers` died, one after the other, before they had said anything of the request."""

    code = "poison_request"

    def __init__(self, workers: int, reason: str) -> None:
        super().__init__(
            f"{workers} workers died with this request on them before its first token (the last one:"
            f" {reason}); it is not tried again, look at the workers' logs before you send it again",
            workers=workers,
            reason=reason,
        )

    @property
    def client_message(self) -> str:
        return (
            f"{self.fields['workers']} workers died with this request on them before its first token; it is"
            " not tried again: look at the workers' logs before you send it again"
        )


class PoolExhausted(Unavailable):
    code = "pool_exhausted"

    def __init__(self, needed: int, free: int, total: int) -> None:
        super().__init__(
            f"{needed} KV blocks needed, {free} of {total} free and nothing may be evicted;"
            " delete capsules, wait, or start the worker with more blocks",
            needed=needed,
            free=free,
            total=total,
        )


class DeviceMemoryExhausted(Unavailable):
    """An allocation during a step failed; `reason` is the device's own sentence."""

    code = "device_memory_exhausted"

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"the device ran out of memory in a step ({reason}); send the request again, and if this goes on"
            " lower scheduler.max_step_tokens, scheduler.max_rows or engine.device_share",
            reason=reason,
        )

    @property
    def client_message(self) -> str:
        return "a worker ran out of memory with this request; send it again"


class CapsulesFull(Unavailable):
    """Capsules keep `kept` of at most `limit`: `needed` more don't fit.

    `unit` is "KV blocks", or of capsules below the device "bytes".
    """

    code = "capsules_full"

    def __init__(self, needed: int, kept: int, limit: int, unit: str = "KV blocks") -> None:
        if unit == "bytes":
            purpose = "of a capsule's text and state below the device"
            remedy = "raise engine.max_below_mb"
        else:
            purpose, remedy = "to keep in a capsule", "start the worker with more blocks"
        super().__init__(
            f"{needed} {unit} {purpose}, but {kept} of the {limit} that capsules may"
            f" keep are kept; delete capsules, give them a ttl_s, or {remedy}",
            needed=needed,
            kept=kept,
            limit=limit,
            unit=unit,
        )

    @property
    def client_message(self) -> str:
        if self.status == 400:
            return (
                f"{self.fields['needed']} {self.fields['unit']} to keep in a capsule, more than all capsules"
                " of a worker may keep; make a shorter one"
            )
        return (
            f"{self.fields['needed']} {self.fields['unit']} to keep in a capsule, but capsules keep as much"
            " as they may; delete capsules, give them a ttl_s, or try again later"
        )


class TierFull(Unavailable):
    """A tier below the device has no room for a capsule, beside the capsules that it holds."""

    code = "tier_full"

    def __init__(self, tier: str, needed: int, room: int, total: int) -> None:
        super().__init__(
            f"{needed} blocks don't fit into the {room} of {total} that {tier} can give up; release"
            f" capsules there, or raise engine.{tier}_gib",
            tier=tier,
            needed=needed,
            room=room,
            total=total,
        )


class LoansFull(Unavailable):
    """`worker` lends to `open` others at once, as many as it may."""

    code = "loans_full"

    def __init__(self, worker: str, open: int, limit: int) -> None:
        super().__init__(
            f"worker {worker} lends to {open} others, at most {limit}; compute the text, or ask again",
            worker=worker,
            open=open,
            limit=limit,
        )


class Saturated(Unavailable):
    """The least busy worker that may take the request has `rows` of at most `limit` rows booked."""

    code = "saturated"

    def __init__(self, rows: int, limit: int) -> None:
        super().__init__(
            f"every worker that may take this request is at its limit: {rows} of {limit} rows are"
            " booked on the least busy one; retry shortly, or start more workers",
            rows=rows,
            limit=limit,
        )


class Overloaded(Unavailable):
    code = "overloaded"

    def __init__(self, waiting: int, limit: int, retry_after_s: float) -> None:
        super().__init__(
            f"{waiting} requests wait for a worker already, the limit is {limit};"
            f" retry in {retry_after_s:.0f} s",
            waiting=waiting,
            limit=limit,
            retry_after_s=retry_after_s,
        )


class DeadlineExceeded(Unavailable):
    """`is_own`: the deadline was the request's own, so that sending it again would be too late.

    `capsule`: the request waited for it to be computed again, else for a worker with room.
    """

    code = "deadline_exceeded"

    def __init__(
        self, waited_s: float, retry_after_s: float, *, is_own: bool, capsule: str | None = None
    ) -> None:
        whose = "its own deadline" if is_own else "the longest that a request may wait"
        happened = "no worker took the request"
        if capsule is not None:
            happened = f"capsule {capsule!r}, lost with its worker, was not there again"
        super().__init__(
            f"{happened} in {waited_s:.1f} s, {whose};"
            f" retry in {retry_after_s:.0f} s, or start more workers",
            waited_s=waited_s,
            retry_after_s=retry_after_s,
            is_own=is_own,
            capsule=capsule,
        )


class QuotaExceeded(Unavailable):
    """The API key has `used` of at most `limit` of `what`."""

    status = 429
    code = "quota_exceeded"

    def __init__(self, what: str, used: int, limit: int, retry_after_s: float) -> None:
        super().__init__(
            f"this API key has used {used} of {limit} {what}; retry in {math.ceil(retry_after_s)} s",
            what=what,
            used=used,
            limit=limit,
            retry_after_s=retry_after_s,
        )


class QueueFull(Unavailable):
    status = 429
    code = "queue_full"

    def __init__(self, waiting: int, limit: int) -> None:
        super().__init__(
            f"{waiting} requests wait already, the limit is {limit}; retry later",
            waiting=waiting,
            limit=limit,
        )


class TenantQueueFull(QueueFull):
    code = "tenant_queue_full"

    def __init__(self, waiting: int, limit: int, retry_after_s: float) -> None:
        MalleeError.__init__(
            self,
            f"{waiting} requests of this tenant wait already, the limit is {limit};"
            f" retry in {retry_after_s:.0f} s",
            waiting=waiting,
            limit=limit,
            retry_after_s=retry_after_s,
        )


class CallbackFailed(MalleeError):
    """`url` without its query."""

    status = 503
    code = "callback_failed"

    def __init__(self, url: str, why: str) -> None:
        super().__init__(f"the callback {url} failed: {why}", url=url, why=why)


class ModelError(MalleeError):
    code = "model_error"


class ModelNotFound(ModelError):
    code = "model_files_not_found"


class UnsupportedModel(ModelError):
    code = "unsupported_model"


class WeightsMismatch(ModelError):
    code = "weights_mismatch"


class StorageError(MalleeError):
    status = 503
    code = "storage_error"


class StorageBusy(StorageError):
    """`holder`: the process that has it open, as it wrote it down."""

    code = "storage_busy"

    def __init__(self, volume: str, holder: str) -> None:
        super().__init__(
            f"volume {volume} is in use by process {holder}; give every worker a volume of its own,"
            " or end that process",
            volume=volume,
            holder=holder,
        )


class StorageFull(StorageError):
    """`needed` bytes more than `limit` allows beside `used`; `what` has the limit.

    Of a full disk neither is known: they are 0.
    """

    code = "storage_full"

    def __init__(self, what: str, needed: int, used: int = 0, limit: int = 0) -> None:
        numbers = f", {used} of {limit} are in use and may not be evicted" if limit else ""
        super().__init__(
            f"no room in {what}: {needed} bytes needed{numbers};"
            " delete capsules, or give it more room",
            what=what,
            needed=needed,
            used=used,
            limit=limit,
        )


class StorageFailed(StorageError):
    """The file system's error on `operation` of `file`; `errno` is 0 where it gave none."""

    code = "storage_failed"

    def __init__(self, operation: str, file: str, errno: int, reason: str) -> None:
        super().__init__(
            f"{operation} {file}: {reason}; look after the disk, nothing of it was accepted",
            operation=operation,
            file=file,
            errno=errno,
            reason=reason,
        )


class BlocksMissing(StorageError):
    """`missing` of `asked` blocks are not stored; `key` is the first of them."""

    code = "blocks_missing"

    def __init__(self, missing: int, asked: int, key: int) -> None:
        super().__init__(
            f"{missing} of {asked} blocks are not stored, the first is {key:016x}; compute them again",
            missing=missing,
            asked=asked,
            key=key,
        )


class CorruptStorage(StorageError):
    """`region` of `file` is not what was written: prefix, header, record, block 3, end."""

    status = 500
    code = "corrupt_storage"

    def __init__(self, file: str, region: str, reason: str) -> None:
        super().__init__(
            f"{region} of {file} is not what was written ({reason}); it is computed again",
            file=file,
            region=region,
            reason=reason,
        )


class CorruptExport(CorruptStorage):
    """Nothing of the capsule may be used."""

    status = 400
    code = "corrupt_export"

    def __init__(self, region: str, reason: str) -> None:
        MalleeError.__init__(
            self,
            f"{region} of the exported capsule is not what was written ({reason}); export it again",
            region=region,
            reason=reason,
        )


class IncompatibleCapsule(MalleeError):
    """`differences`: (field, its value in the capsule, its value here), "" where there is none."""

    status = 409
    code = "incompatible_capsule"

    def __init__(self, capsule: str, differences: Sequence[tuple[str, str, str]]) -> None:
        told = "; ".join(
            f"{field} was {shown(theirs)} and is {shown(ours)} here"
            for field, theirs, ours in differences
        )
        super().__init__(
            f"capsule {shown(capsule)} does not fit this worker: {told}; create it again",
            capsule=capsule,
            differences=[list(each) for each in differences],
        )


class CodecError(MalleeError):
    status = 400
    code = "malformed_message"


class ConfigError(MalleeError):
    code = "config_error"


class InternalError(MalleeError):
    code = "internal_error"


class CorruptKV(InternalError):
    """`stories`: the last owners of the blocks, one line each."""

    code = "corrupt_kv"

    def __init__(self, what: str, stories: Sequence[str]) -> None:
        super().__init__(f"{what}; {'; '.join(stories)}", what=what, stories=list(stories))


def _all_types() -> dict[str, type[MalleeError]]:
    found: dict[str, type[MalleeError]] = {}
    todo: list[type[MalleeError]] = [MalleeError]
    while todo:
        cls = todo.pop()
        found[cls.code] = cls
        todo.extend(cls.__subclasses__())
    return found


def _rebuild(code: str, message: str, fields: dict[str, Any]) -> MalleeError:
    return _BY_CODE.get(code, InternalError).with_message(message, **fields)


def type_of(code: str) -> type[MalleeError] | None:
    """The error type with this `code`, or None."""
    return _BY_CODE.get(code)


def from_wire(wire: tuple[str, str, dict[str, Any]]) -> MalleeError:
    """The error that `to_wire` described; an unknown code becomes `InternalError` with the text."""
    code, message, fields = wire
    return _rebuild(code, message, dict(fields))


_BY_CODE = _all_types()
