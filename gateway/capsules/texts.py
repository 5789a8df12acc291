"""The texts of capsules in the gateways' store, so that any gateway can compute a capsule again.

The local memory is the first place asked. A capsule that a client had kept is put into the store as it is
made: as what it adds to the stored capsule that it continues, if there is one. One that an answer left is in
its gateway's memory alone, which tells it when another gateway asks.

A text stays for `TTL_S` after its capsule was made or last forked. That is twice the longest time without
use that `http.max_ttl_s` allows by default; a capsule that is kept until it is deleted, and that nobody forks
for so long, is lost if its worker is. That a capsule was released stays known as long, so that no gateway
computes it from a text that it remembers; its tokens stay if other texts may begin with them.
"""

import logging
from contextlib import suppress
from typing import Final

from msgspec import structs

from mallee.gateway.peers import Peers
from mallee.gateway.shell import GatewayContext
from mallee.gateway.store.store import Entry, Store
from mallee.protocol.codec import encode
from mallee.protocol.errors import MalleeError, StoreAway, UnknownCapsule
from mallee.protocol.gateways.capsule_texts import StoredText, decode_text
from mallee.protocol.hashing import Tokens
from mallee.protocol.ids import CapsuleId, Scope, owner_of
from mallee.protocol.messages import pack_tokens, unpack_tokens
from mallee.router.dispatch.token_memory import CapsuleTokens, StoredAs, TokenMemory, TokenPath
from mallee.runtime.tasks import Tasks

log = logging.getLogger(__name__)

TTL_S: Final = 172_800.0
MAX_DEPTH: Final = 16  # of texts that a text begins with: it is read one by one
MAX_TOLD_NBYTES: Final = 512 << 10  # of a text in an answer; a longer one goes by the store
RELEASE_S: Final = 1.0  # for the store to have a release, before the client is answered
_LAYOUT: Final = 1
_ASK: Final = "capsule.text"


class CapsuleTexts:
    """One gateway's side: the `TextStore` of its memory. Belongs to its event loop."""

    def __init__(
        self,
        context: GatewayContext,
        store: Store,
        peers: Peers,
        memory: TokenMemory,
        tasks: Tasks,
    ) -> None:
        self._bucket = store.bucket("texts", StoredText, version=_LAYOUT, ttl_s=TTL_S)
        self._store = store
        self._peers = peers
        self._memory = memory
        self._tasks = tasks
        self._wall_clock = context.wall_clock
        self._wanted: set[CapsuleId] = set()  # that are fetched in the background
        memory.store = self
        peers.share(_ASK, self._tell)

    # The memory: `TextStore`

    def put(
        self, capsule: CapsuleId, entry: CapsuleTokens, before: CapsuleTokens | None = None
    ) -> None:
        last = None if before is None else before.path.stored
        edition = 0
        if before is not None and last is not None and last.capsule == capsule:
            edition = last.edition
            if before.path is not entry.path:  # another text under its id
                before.path.stored, edition = None, edition + 1
        text = self._packed(capsule, entry, edition)
        self._bucket.put_soon(owner_of(text.scope), capsule, text)
        if entry.path.stored is None or entry.path.stored.capsule == capsule:
            entry.path.stored = StoredAs(capsule, edition, text.depth, text.since)

    def drop(self, capsule: CapsuleId, entry: CapsuleTokens) -> None:
        entry.path.stored = None
        self._bucket.delete_soon(owner_of(entry.path.scope), capsule)

    def _packed(self, capsule: CapsuleId, entry: CapsuleTokens, edition: int) -> StoredText:
        now = self._wall_clock()
        tails: list[Tokens] = []
        path: TokenPath | None = entry.path
        while path is not None and (path.stored is None or path.stored.capsule == capsule):
            tails.append(path.tail)
            path = path.parent
        base = None if path is None else path.stored
        if base is None or base.depth >= MAX_DEPTH or base.since < now - TTL_S / 2:
            base, tails = None, [entry.path.tokens()]
        elif path is not None:
            path.is_continued = True
        return StoredText(
            tokens=b"".join(map(pack_tokens, reversed(tails))),
            scope=entry.path.scope,
            grammar=entry.grammar,
            ttl_s=entry.ttl_s,
            weights=entry.weights,
            continuation=entry.continuation,
            parent="" if base is None else base.capsule,
            parent_edition=0 if base is None else base.edition,
            edition=edition,
            depth=0 if base is None else base.depth + 1,
            made=now,
            since=now if base is None else base.since,
        )

    def renew(self, capsule: CapsuleId) -> None:
        """`capsule` is used: its text is to stay for longer."""
        entry = self._memory.get(capsule)
        if entry is None or entry.ttl_s is None or (stored := entry.path.stored) is None:
            return
        if stored.capsule == capsule and stored.since < self._wall_clock() - TTL_S / 2:
            self.put(capsule, entry, entry)

    # Other gateways' texts

    async def fetch(self, capsule: CapsuleId, scope: Scope) -> bool:
        """Whether the text of `capsule` is in the memory now.

        Raises UnknownCapsule if it was released; Unavailable where it may be, and nobody can be asked.
        """
        if capsule in self._memory or await self.read(capsule, scope) is not None:
            return True
        raw = await self._peers.ask_maker(_ASK, capsule, scope)
        if not raw:
            return raw is not None and await self.read(capsule, scope) is not None
        text = decode_text(raw)
        self._take(capsule, text, TokenPath(None, unpack_tokens(text.tokens), text.scope))
        return True

    async def read(self, capsule: CapsuleId, scope: Scope) -> StoredText | None:
        """As `fetch`, from the store alone: the value there."""
        found = await self._unreleased(capsule, scope)
        if found is None:
            return None
        text = found.value
        rest = [(capsule, text)]
        path: TokenPath | None = None
        while text.parent:
            parent = CapsuleId(text.parent)
            path = self._remembered(parent, text.parent_edition)
            if path is not None:
                break
            found = await self._bucket.get(scope, parent)
            if found is None or found.value.edition != text.parent_edition:
                log.info("the text that capsule %s begins with is not stored any more", capsule)
                return None
            text = found.value
            rest.append((parent, text))
        for name, each in reversed(rest):
            if each.tokens or path is None:
                path = TokenPath(path, unpack_tokens(each.tokens), each.scope)
                path.stored = StoredAs(name, each.edition, each.depth, each.since)
                path.is_continued = True  # as far as this gateway knows
        assert path is not None, "it has at least its own text"
        self._take(capsule, rest[0][1], path)
        return rest[0][1]

    async def adopt(self, capsule: CapsuleId, scope: Scope) -> None:
        """As `fetch`, of one that this gateway makes again from now on if its worker drains."""
        if await self.fetch(capsule, scope) and (entry := self._memory.get(capsule)) is not None:
            self._memory.keep(capsule, entry._replace(is_own=True), is_stored=True)

    def want(self, capsule: CapsuleId, scope: Scope) -> None:
        """As `fetch`, in the background: the text will be needed if the capsule's worker is lost."""
        if capsule not in self._memory and capsule not in self._wanted:
            self._wanted.add(capsule)
            self._tasks.spawn(self._fetch_wanted(capsule, scope), name="a capsule's text")

    async def check(self, capsule: CapsuleId, scope: Scope) -> None:
        """Before `capsule` is computed again from the memory: raises UnknownCapsule if it was released.

        At another gateway, that is, as far as the store can be asked.
        """
        with suppress(StoreAway):
            await self._unreleased(capsule, scope)

    async def _unreleased(self, capsule: CapsuleId, scope: Scope) -> Entry[StoredText] | None:
        """The text in the store. Raises UnknownCapsule if the capsule was released."""
        found = await self._bucket.get(scope, capsule)
        if found is not None and found.value.is_released:
            self._memory.forget(capsule)
            raise UnknownCapsule(capsule)
        return found

    async def release(self, capsule: CapsuleId, scope: Scope) -> None:
        """Have no gateway compute `capsule` again, from when the store has it on."""
        text, entry = StoredText(), self._memory.get(capsule)
        stored = None if entry is None else entry.path.stored
        if entry is None:
            with suppress(StoreAway):
                found = await self._bucket.get(scope, capsule)
                text = text if found is None else found.value
        elif stored is not None and stored.capsule == capsule and self._may_begin(entry.path):
            text = self._packed(capsule, entry, stored.edition)
        self._memory.forget(capsule)
        self._bucket.put_soon(scope, capsule, structs.replace(text, is_released=True))

    async def released(self, capsule: CapsuleId, scope: Scope) -> None:
        """Return when other gateways can see a release, or can't soon."""
        if self._store.is_up:
            await self._bucket.settled(scope, capsule, RELEASE_S)

    def close(self) -> None:
        """Leave the store as it is: what ends from now on ends with this gateway alone."""
        self._memory.store = None

    async def _fetch_wanted(self, capsule: CapsuleId, scope: Scope) -> None:
        try:
            await self.fetch(capsule, scope)
        except MalleeError as error:
            log.info("the text of a capsule was not told: %s", error)
        finally:
            self._wanted.discard(capsule)

    def _may_begin(self, path: TokenPath) -> bool:
        """Whether another stored text may begin with that of `path`."""
        return path.is_continued or bool(self._peers.others)

    def _remembered(self, capsule: CapsuleId, edition: int) -> TokenPath | None:
        entry = self._memory.get(capsule)
        stored = None if entry is None else entry.path.stored
        is_same = stored is not None and (stored.capsule, stored.edition) == (capsule, edition)
        return entry.path if entry is not None and is_same else None

    def _take(self, capsule: CapsuleId, text: StoredText, path: TokenPath) -> None:
        entry = CapsuleTokens(
            path=path,
            grammar=text.grammar,
            ttl_s=text.ttl_s,
            weights=text.weights,
            is_own=False,
            continuation=text.continuation,
        )
        self._memory.keep(capsule, entry, is_stored=True)

    async def _tell(self, name: str, scope: Scope, _: bytes) -> bytes | None:
        """The text of a capsule that is not in the store, or b"": it is there now."""
        capsule = CapsuleId(name)
        entry = self._memory.get(capsule)
        if entry is None:
            return None
        text = structs.replace(
            self._packed(capsule, entry, 0), tokens=pack_tokens(entry.path.tokens()), parent=""
        )
        raw = encode(text)
        if len(raw) <= MAX_TOLD_NBYTES:
            return raw
        found = await self._unreleased(capsule, scope)
        at = 0 if found is None else found.revision
        await self._bucket.put(scope, capsule, text, at=at)  # else it was released meanwhile
        return b""
