"""Responses that run without a client: here, and as readers at any gateway see them.

The record of one is in the store from its beginning on, with its gateway. Of one that is streamed the events
are below its name, in batches that are called by the number of their first one, without the last event, which
follows from the record once that is over; an empty batch comes then.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import ExitStack, aclosing, suppress
from typing import Any, Final

from mallee.api.responses.running import Run
from mallee.api.responses.store import Record, StoredResponses
from mallee.api.responses.writing import ending, sse
from mallee.gateway.access.visits import Visit
from mallee.protocol.errors import MalleeError, StoreAway, StoreFull, Unavailable
from mallee.protocol.ids import Scope
from mallee.runtime.tasks import Tasks

BATCH_S: Final = 0.1  # for which events wait for others to be stored with
RETRY_S: Final = 0.2  # of a write, while the store is away
LOOK_S: Final = 0.5  # between looks at a record whose events don't come


class Background:
    """A response that runs here, and its events so far, for readers that come and go.

    It counts in the use of its `tenant`'s key. Raises QuotaExceeded.
    """

    def __init__(
        self, run: Run, stored: StoredResponses, visit: Visit, *, tenant: str, streams: bool
    ) -> None:
        with ExitStack() as stay:
            run.admit(stay.enter_context(visit.staying()))
            self._stay = stay.pop_all()
        self.tenant = tenant
        self.scope = run.scope
        self.streams = streams
        self._run = run
        self._stored = stored
        self._name = run.writer.body.id
        self._events: list[bytes] = []
        self._num_stored = 0  # of them
        self._revision: int | None = 0  # of its record; None: another has ended or deleted it
        self._status = ""  # in the store
        self._news = asyncio.Event()
        self._is_over = self._is_ending = False
        self._begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._storing: asyncio.Task[None] | None = None
        self._answering: asyncio.Task[None] | None = None

    async def begun(self) -> None:
        """Returns once its record is stored. Raises StoreAway, StoreFull: it never was."""
        await self._begun

    def start(self, tasks: Tasks) -> None:
        """Run it to its end, which is stored. Errors become its own."""
        self.life = tasks.spawn(self._live(tasks), name="background response")
        self.life.add_done_callback(lambda _: self._begun.cancel())

    async def _live(self, tasks: Tasks) -> None:
        try:
            if not await self._is_begun():
                return
            if not self._is_ending:
                self._answering = tasks.spawn(self._answer(tasks), name="a background answer")
                await asyncio.wait([self._answering])
            if not self._record.is_over:
                self._add(self._run.cancelled())
            await _until_stored(self._end)
        except asyncio.CancelledError:
            await self._stop()
            raise
        finally:
            self._stay.close()
            self._is_over = True
            self._news.set()

    def end(self, tasks: Tasks) -> None:
        """Have it end soon."""
        if self._answering is not None and not self._is_ending:
            tasks.cancel(self._answering)  # once: a second time would break off what ends it
        self._is_ending = True

    async def follow(self, after: int) -> AsyncGenerator[bytes, None]:
        """Events from number `after` + 1 on, those to come too."""
        sent = after + 1
        while True:
            self._news.clear()
            waiting = self._events[sent:]
            if waiting:
                sent += len(waiting)
                yield b"".join(waiting)  # others may come meanwhile
            elif self._is_over:
                return
            else:
                await self._news.wait()

    @property
    def _record(self) -> Record:
        return self._run.record(self._run.writer.num_events if self.streams else None)

    async def _is_begun(self) -> bool:
        try:
            await self._put()
        except MalleeError as error:
            self._begun.set_exception(error)
            return False
        self._begun.set_result(None)
        return True

    async def _answer(self, tasks: Tasks) -> None:
        try:
            first = await self._run.open(0.0)
            async for events in self._run.events(first):
                self._add(events)
                if self._storing is None or self._storing.done():
                    self._storing = tasks.spawn(self._store_soon(tasks), name="events")
        except Exception as error:
            self._add(self._run.failed_early(error))
        finally:
            await self._run.close()

    def _add(self, events: list[dict[str, Any]]) -> None:
        if self.streams:
            self._events += map(sse, events)
        self._news.set()

    async def _store_soon(self, tasks: Tasks) -> None:
        """Store what is new, some of it at once."""
        assert self._answering is not None
        await asyncio.wait([self._answering], timeout=BATCH_S)
        if self._status == "queued" and not self._record.is_over:
            await _until_stored(self._put)
        if self._revision is None:
            self.end(tasks)
        await _until_stored(self._append)

    async def _append(self) -> None:
        batch = self._events[self._num_stored :]
        if batch:
            await self._stored.append(self.scope, self._name, self._num_stored, batch)
            self._num_stored += len(batch)

    async def _put(self) -> None:
        """Store the record, if nobody else has ended it."""
        if self._revision is not None:
            record = self._record
            self._revision = await self._stored.put(self.scope, record, at=self._revision)
            self._status = record.body.status

    async def _end(self) -> None:
        """Store the end, and have the last event."""
        if self._storing is not None:
            await asyncio.wait([self._storing])
        if self.streams:
            await self._append()
        if self._status in ("queued", "in_progress"):
            await self._put()
        if self._revision is None:
            self._run.failed(Unavailable("it was ended or deleted at another gateway"))
        elif self.streams:
            await self._stored.append(self.scope, self._name, self._num_stored, [])
        self._add([self._run.last()])

    async def _stop(self) -> None:
        """This gateway closes: say so, if the store can be reached."""
        if self._answering is not None:
            await asyncio.wait([self._answering])
        if not self._record.is_over:
            error = Unavailable("the gateway that ran this response was stopped; send it again")
            self._add(self._run.failed(error))
        with suppress(StoreAway, StoreFull):
            await self._end()


async def _until_stored(work: Callable[[], Awaitable[None]]) -> None:
    """Do `work`, again and again while the store takes nothing."""
    while True:
        try:
            return await work()
        except (StoreAway, StoreFull):
            await asyncio.sleep(RETRY_S)


async def replay(events: list[bytes], record: Record, after: int) -> AsyncGenerator[bytes, None]:
    """`events` of a response that is over, and its last one, from number `after` + 1 on."""
    last = sse(ending(record.body, len(events)))
    if rest := [*events, last][after + 1 :]:
        yield b"".join(rest)


async def follow(
    stored: StoredResponses, scope: Scope, name: str, after: int
) -> AsyncGenerator[bytes, None]:
    """Those of one that runs elsewhere, as they are stored. Raises ConnectionError: they break off."""
    try:
        known = 0  # events
        async with aclosing(_batches(stored, scope, name)) as batches:
            async for number, batch in batches:
                if number > known:
                    raise ConnectionError(f"events {known} to {number - 1} are not stored any more")
                rest = batch[max(known, after + 1) - number :]
                known = max(known, number + len(batch))
                if rest:
                    yield b"".join(rest)
        record = await stored.find(name, scope)
        events = await stored.events_of(scope, record)
        async for chunk in replay(events, record, max(after, known - 1)):
            yield chunk
    except MalleeError as error:
        raise ConnectionError(f"the events of a response break off: {error}") from error


async def _batches(
    stored: StoredResponses, scope: Scope, name: str
) -> AsyncGenerator[tuple[int, list[bytes]], None]:
    """Events and the number of the first, until the response is over. Raises as `StoredResponses.find`."""
    async with aclosing(stored.events.follow(scope, name)) as found:
        while True:
            coming = asyncio.ensure_future(anext(found))
            try:
                while not coming.done():
                    await asyncio.wait([coming], timeout=LOOK_S)
                    if not coming.done() and (await stored.find(name, scope)).is_over:
                        return
            finally:
                if coming.cancel():
                    await asyncio.wait([coming])
            below, batch = coming.result()
            if not batch:
                return
            yield int(below), batch
