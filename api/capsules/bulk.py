"""Capsules of one scope together: those that a query means are listed, counted or deleted."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final, TypeVar

import msgspec
from starlette.datastructures import QueryParams

from mallee.gateway.capsules.capsules import CapsuleInfo
from mallee.gateway.gateway import Gateway
from mallee.protocol.api.capsules import CapsuleCount
from mallee.protocol.errors import (
    BadRequest,
    InvalidParameter,
    LookupIncomplete,
    MalleeError,
    NotFound,
    Unavailable,
)
from mallee.protocol.ids import CapsuleId, Scope, request_of

PAGE: Final = 1024  # capsules that are looked at together
ASKED_PAGE: Final = 128  # and of which workers are asked
NUM_ASKED: Final = 64  # questions to workers at once, of one request
TIERS: Final = ("device", "host", "disk", "none")
MAX_AGE_S: Final = 1e9
FILTERS: Final = ("request", "pinned", "tier", "min_age_s")

T = TypeVar("T")


class CapsuleFilter(msgspec.Struct, frozen=True, kw_only=True):
    """The capsules that are meant; None: whatever they have.

    `request`: the answer whose branches left them. `min_age_s`: seconds since this gateway learned of them.
    """

    request: str | None = None
    pinned: bool | None = None
    tier: str | None = None
    min_age_s: float | None = None

    @property
    def is_empty(self) -> bool:
        return self == CapsuleFilter()

    @property
    def asks_workers(self) -> bool:
        """Whether only a capsule's worker can tell if it is meant."""
        return self.pinned is not None or self.tier is not None

    def may_mean(self, info: CapsuleInfo, now: float) -> bool:
        """Whether `info` is meant, as far as that shows without asking its worker."""
        is_named = self.request is None or _is_of(info.capsule, self.request)
        return is_named and (self.min_age_s is None or now - info.created >= self.min_age_s)

    def means(self, info: CapsuleInfo) -> bool:
        """Whether `info`, that its worker has told of, is meant."""
        status = info.status
        if not self.asks_workers:
            return True
        assert status is not None, "its worker was asked"
        is_as_kept = self.pinned is None or status.is_pinned == self.pinned
        return is_as_kept and (self.tier is None or status.tier == self.tier)


def read_filter(query: QueryParams, others: tuple[str, ...] = ()) -> CapsuleFilter:
    """The filter of a query, which may have `others` too. Raises InvalidParameter, naming the parameter."""
    known = (*FILTERS, *others)
    for name, _ in query.multi_items():
        if name not in known:
            remedy = f"not known here; give some of {', '.join(known)}"
            raise InvalidParameter(name, query[name], remedy)
        if len(query.getlist(name)) > 1:
            raise InvalidParameter(name, query.getlist(name), "give it once")
    tier = query.get("tier")
    if tier is not None and tier not in TIERS:
        raise InvalidParameter("tier", tier, f"give one of {', '.join(TIERS)}")
    if query.get("request") == "":
        raise InvalidParameter("request", "", "give the id of an answer, or leave it out")
    return CapsuleFilter(
        request=query.get("request"),
        pinned=read_bool(query, "pinned"),
        tier=tier,
        min_age_s=_seconds(query, "min_age_s"),
    )


def read_bool(query: QueryParams, name: str) -> bool | None:
    """Raises InvalidParameter."""
    given = query.get(name)
    if given is None:
        return None
    if given not in ("true", "false"):
        raise InvalidParameter(name, given, "give true or false")
    return given == "true"


def _seconds(query: QueryParams, name: str) -> float | None:
    given = query.get(name)
    if given is None:
        return None
    try:
        seconds = float(given)
    except ValueError:
        seconds = -1.0
    if not 0.0 <= seconds <= MAX_AGE_S:  # also refuses NaN
        raise InvalidParameter(name, given, f"give seconds, 0 to {MAX_AGE_S:g}")
    return seconds


@dataclass(frozen=True, slots=True)
class Bulk:
    """The capsules of one `scope` that `wanted` means. `clock`: seconds since the epoch."""

    gateway: Gateway
    scope: Scope
    wanted: CapsuleFilter
    clock: Callable[[], float]

    async def page(self, after: str, most: int) -> tuple[list[CapsuleInfo], int]:
        """The first `most` behind `after`, and the number of capsules whose worker didn't tell."""
        found: list[CapsuleInfo] = []
        num_unknown = 0
        size = most if self.wanted.is_empty else PAGE
        async for infos, unknown in self._runs(after, size):
            found += infos
            num_unknown += len(unknown)
            if len(found) >= most:
                break
        return found[:most], num_unknown

    async def count(self) -> CapsuleCount:
        num = tokens = num_unknown = 0
        async for infos, unknown in self._runs():
            num += len(infos)
            tokens += sum(info.boundary for info in infos)
            num_unknown += len(unknown)
        return CapsuleCount(count=num, tokens=tokens, unknown=num_unknown)

    async def delete(self, deleted: Callable[[CapsuleId], None]) -> int:
        """Forget them; `deleted` is told each. One that goes meanwhile counts as deleted.

        Raises the first error of those that couldn't be deleted, after the others were.
        """
        num = 0
        errors: list[MalleeError] = []
        async for infos, unknown in self._runs():
            for info, error in await _each(infos, self._release):
                if error is None:
                    num += 1
                    deleted(info.capsule)
                else:
                    errors.append(error)
            silent = Unavailable("their worker doesn't say whether they are meant")
            errors += [silent] * len(unknown)
        if errors:
            raise errors[0].with_message(
                f"{len(errors)} of {len(errors) + num} capsules could not be deleted, the first:"
                f" {errors[0].client_message}; the others are deleted: ask again"
            )
        return num

    async def _runs(
        self, after: str = "", size: int = PAGE
    ) -> AsyncIterator[tuple[list[CapsuleInfo], list[str]]]:
        """Those that are meant, by name, and names of those that can't be told; in runs.

        The scope's capsules are gone through once.
        """
        size = min(size, ASKED_PAGE) if self.wanted.asks_workers else size
        held = self.gateway.capsules.of(self.scope, after)
        while run := list(islice(held, size)):
            now = self.clock()
            infos = [info for info in run if self.wanted.may_mean(info, now)]
            unknown: list[str] = []
            if self.wanted.asks_workers:
                asked = await _each(infos, self._inspect)
                told = [(old, new) for old, new in asked if new is not None]
                unknown = [old.capsule for old, new in told if new.status is None]
                infos = [
                    new for _, new in told if new.status is not None and self.wanted.means(new)
                ]
            yield infos, unknown
            await asyncio.sleep(0)  # others' tokens go on between runs

    async def _inspect(self, info: CapsuleInfo) -> CapsuleInfo | None:
        try:
            return await self.gateway.capsules.inspect(info.capsule, self.scope)
        except NotFound:  # it has gone
            return None
        except LookupIncomplete:
            return info

    async def _release(self, info: CapsuleInfo) -> MalleeError | None:
        try:
            await self.gateway.capsules.release(info.capsule, self.scope)
        except NotFound:
            return None
        except MalleeError as error:
            return error
        return None


async def _each(
    infos: list[CapsuleInfo], ask: Callable[[CapsuleInfo], Awaitable[T]]
) -> list[tuple[CapsuleInfo, T]]:
    """Answers of `ask` about each, NUM_ASKED at once."""
    turns = asyncio.Semaphore(NUM_ASKED)

    async def asked(info: CapsuleInfo) -> tuple[CapsuleInfo, T]:
        async with turns:
            return info, await ask(info)

    return await asyncio.gather(*map(asked, infos))


async def release_each(
    gateway: Gateway,
    capsules: Sequence[CapsuleId],
    scope: Scope,
    released: Callable[[CapsuleId], None],
) -> int:
    """Forget capsules, `NUM_ASKED` at once; the number of those that are gone now, each told."""
    turns = asyncio.Semaphore(NUM_ASKED)

    async def release(capsule: CapsuleId) -> bool:
        async with turns:
            try:
                await gateway.capsules.release(capsule, scope)
            except NotFound:
                pass  # it went by itself
            except MalleeError:
                return False
            released(capsule)
            return True

    return sum(await asyncio.gather(*map(release, capsules)))


def _is_of(capsule: str, request: str) -> bool:
    """Whether an answer left `capsule`; one that went on elsewhere has parts with numbers."""
    name = request_of(capsule)
    return name == request or name.startswith(f"{request}-")


def check_wanted(wanted: CapsuleFilter, is_all: bool | None) -> None:
    """Raises BadRequest for a deletion that doesn't say of what."""
    if wanted.is_empty and not is_all:
        raise BadRequest(
            f"say which capsules to delete: {', '.join(FILTERS)}, or all=true", param="all"
        )
    if is_all and not wanted.is_empty:
        raise InvalidParameter("all", is_all, "give it alone, or leave it out")
