"""Blocks that several prompts begin with, each computed by one of them."""

import asyncio
from collections.abc import Callable, Iterable, Sequence


class Flights:
    """Blocks that are being computed for the first time, each by one branch."""

    def __init__(self, holds: Callable[[int], bool]) -> None:
        self._holds = holds
        self._flights: dict[int, asyncio.Future[bool]] = {}  # by block

    async def join(self, hashes: Sequence[int]) -> asyncio.Future[bool]:
        """Wait for the blocks of a prompt that others compute; begin a flight with those of its own."""
        had = 0
        while True:
            at = next((i for i in range(len(hashes), had, -1) if hashes[i - 1] in self._flights), 0)
            if not at:
                break
            # One that was given up has computed nothing: then another goes first.
            if await asyncio.shield(self._flights[hashes[at - 1]]):
                had = at
        flight: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        for each in hashes[had:]:
            if each not in self._flights and not self._holds(each):
                self._flights[each] = flight
        return flight

    def land(self, flight: asyncio.Future[bool], hashes: Iterable[int], *, is_done: bool) -> None:
        """End a flight. Ignored if it has ended."""
        if flight.done():
            return
        for each in hashes:
            if self._flights.get(each) is flight:
                del self._flights[each]
        flight.set_result(is_done)

    def check(self) -> None:
        """Raises AssertionError if a flight that has ended is kept."""
        assert not any(flight.done() for flight in self._flights.values())
