"""The gateways' common memory of capsules: each asks the others for what it doesn't know."""

import asyncio
import logging
from typing import Final, Protocol

from mallee.gateway.records import SharedRecords
from mallee.protocol.codec import encode
from mallee.protocol.errors import CodecError, LookupIncomplete, MalleeError
from mallee.protocol.gateways.capsule_texts import CapsuleKnown, CapsuleState, decode_known
from mallee.protocol.ids import CapsuleId, Scope, owner_of
from mallee.protocol.messages import pack_tokens, unpack_tokens
from mallee.router.dispatch.token_memory import CapsuleTokens, TokenMemory, TokenPath

log = logging.getLogger(__name__)

ASK_S: Final = 2.0  # the longest wait for the others' answers
_KIND: Final = "capsule"
_ANYTHING: Final = b""  # asked for: its state, or its text
_TEXT: Final = b"t"  # asked for: its text, or its state if it is promised


class Known(Protocol):
    """The capsules that one gateway knows."""

    def state(self, capsule: CapsuleId) -> CapsuleState | None:
        """A capsule as other gateways are told it: of one that is promised, by its own gateway alone."""
        ...

    def on_forgotten(self, capsule: CapsuleId) -> None:
        """A client released `capsule`, at this gateway or another."""
        ...


class SharedTexts:
    """One gateway's share. Belongs to its event loop."""

    def __init__(self, records: SharedRecords, memory: TokenMemory, known: Known) -> None:
        self._records = records
        self._memory = memory
        self._known = known
        self._asked: dict[tuple[CapsuleId, bytes], asyncio.Future[CapsuleState | None]] = {}
        records.share(_KIND, self._tell, self._forget, self._take_over)

    async def find(self, capsule: CapsuleId, scope: Scope) -> CapsuleState | None:
        """Ask the others for a capsule; None: no other knows its state.

        Its text is here afterwards, if the one that answered has it. Raises LookupIncomplete.
        """
        return await self._ask(capsule, scope, _ANYTHING)

    async def fetch(self, capsule: CapsuleId, scope: Scope) -> None:
        """Ask the others for the text of `capsule`: it is here afterwards, if one has it and answers."""
        if capsule not in self._memory:
            try:
                await self._ask(capsule, scope, _TEXT)
            except LookupIncomplete as error:
                log.info("the text of a capsule was not told: %s", error)

    def want(self, capsule: CapsuleId, scope: Scope) -> None:
        """As `fetch`, in the background: the text will be needed if the capsule's worker is lost."""
        if capsule not in self._memory and self._records.has_others:
            self._records.tasks.spawn(self.fetch(capsule, scope))

    def forget(self, capsule: CapsuleId, scope: Scope) -> None:
        """Forget `capsule` here and everywhere."""
        self._forget(capsule, scope)
        self._records.forget(_KIND, capsule, scope)

    def leave_to(self, heir: str) -> None:
        """Have the gateway `heir` know the kept capsules that were made here, and answer for them."""
        for capsule, entry in self._memory.own_kept():
            known = encode(_known(None, entry))
            self._records.copy(_KIND, capsule, owner_of(entry.path.scope), known, to=heir)

    async def _ask(self, capsule: CapsuleId, scope: Scope, wanted: bytes) -> CapsuleState | None:
        """The answer to one question, which goes on if one of those that wait for it is cancelled."""
        key = capsule, wanted
        asked = self._asked.get(key)
        if asked is None:
            asked = self._asked[key] = asyncio.get_running_loop().create_future()
            self._records.tasks.spawn(self._answer(asked, capsule, scope, wanted))
        return await asyncio.shield(asked)

    async def _answer(
        self,
        asked: asyncio.Future[CapsuleState | None],
        capsule: CapsuleId,
        scope: Scope,
        wanted: bytes,
    ) -> None:
        error: MalleeError = LookupIncomplete("it shuts down")
        state = None
        try:
            raw = await self._records.fetch(_KIND, capsule, scope, given=wanted, wait_s=ASK_S)
            state = None if raw is None else self._hear(capsule, raw, is_own=False)
        except CodecError:
            log.exception("another gateway's answer about a capsule was refused")
            error = LookupIncomplete("the answer of another one can't be read")
        except MalleeError as refusal:
            error = refusal
        else:
            asked.set_result(state)
        finally:
            del self._asked[capsule, wanted]
            if not asked.done():
                asked.set_exception(error)
                asked.exception()  # all that waited may be gone

    def _hear(self, capsule: CapsuleId, raw: bytes, *, is_own: bool) -> CapsuleState | None:
        known = decode_known(raw)
        if known.tokens is not None:
            path = TokenPath(None, unpack_tokens(known.tokens), known.scope)
            entry = CapsuleTokens(
                path=path,
                grammar=known.grammar,
                ttl_s=known.ttl_s,
                weights=known.weights,
                is_own=is_own,
                continuation=known.continuation,
            )
            self._memory.keep(capsule, entry)
        return known.state

    async def _tell(self, name: str, scope: Scope, wanted: bytes) -> bytes | None:
        capsule = CapsuleId(name)
        entry, state = self._memory.get(capsule), self._known.state(capsule)
        if state is not None and state.is_promised:
            return encode(CapsuleKnown(state))  # its text is that of the prefill, which may fail
        if entry is None and (state is None or wanted == _TEXT):
            return None
        return encode(CapsuleKnown(state) if entry is None else _known(state, entry))

    def _take_over(self, name: str, scope: Scope, raw: bytes) -> None:
        """A gateway that ends leaves a capsule to this one, which makes it again from now on."""
        self._hear(CapsuleId(name), raw, is_own=True)

    def _forget(self, name: str, scope: Scope) -> None:
        self._memory.forget(CapsuleId(name))
        self._known.on_forgotten(CapsuleId(name))


def _known(state: CapsuleState | None, entry: CapsuleTokens) -> CapsuleKnown:
    return CapsuleKnown(
        state=state,
        tokens=pack_tokens(entry.path.tokens()),
        scope=entry.path.scope,
        grammar=entry.grammar,
        ttl_s=entry.ttl_s,
        weights=entry.weights,
        continuation=entry.continuation,
    )
