"""One timer for many: nobody early, nobody forgotten, the nearly due together."""

import asyncio

from mallee.actors.mock.pacer import GRAIN_S, MAX_PACE_S, PACE_S, Pacer
from support.waiting import elapse, until


class Sleeper:
    """Notes when it was woken; sleeps again if `naps` are left."""

    def __init__(self, pacer: Pacer, naps: list[float] | None = None) -> None:
        self.pacer = pacer
        self.naps = naps or []
        self.due: float | None = None
        self.woken: list[float] = []

    def sleep(self, due: float) -> None:
        self.due = due
        self.pacer.at(due, self)

    def wake(self) -> None:
        now = asyncio.get_running_loop().time()
        assert self.due is not None
        assert now >= self.due
        self.woken.append(self.due)
        self.due = None
        if self.naps:
            self.sleep(self.woken[-1] + self.naps.pop(0))


def here() -> float:
    return asyncio.get_running_loop().time()


async def test_everybody_is_woken_once_and_never_early() -> None:
    pacer = Pacer(asyncio.get_running_loop().time)
    sleepers = [Sleeper(pacer) for _ in range(200)]
    begin = here()
    for i, sleeper in enumerate(sleepers):
        sleeper.sleep(begin + 0.0001 * ((37 * i) % 200))
    pacer.check()
    await until(lambda: all(s.woken for s in sleepers))
    assert all(len(s.woken) == 1 for s in sleepers)
    assert pacer.stats().calls == 200
    assert pacer.stats().wakes <= 0.02 / GRAIN_S + 3
    pacer.check()
    pacer.close()


async def test_who_wants_another_time_is_not_woken_at_the_old_one() -> None:
    pacer = Pacer(asyncio.get_running_loop().time)
    begin = here()
    later, sooner, gone = (Sleeper(pacer) for _ in range(3))
    later.sleep(begin + 0.002)
    later.sleep(begin + 0.01)
    sooner.sleep(begin + 60)
    sooner.sleep(begin + 0.003)
    gone.sleep(begin + 0.001)
    gone.due = None
    await until(lambda: bool(later.woken and sooner.woken))
    assert later.woken == [begin + 0.01]
    assert sooner.woken == [begin + 0.003]
    assert not gone.woken
    pacer.close()
    pacer.check()


async def test_what_takes_no_time_leaves_the_loop_to_others() -> None:
    pacer = Pacer(asyncio.get_running_loop().time)
    busy = Sleeper(pacer, [0.0] * 500)
    busy.sleep(here())
    turns = 0
    while len(busy.woken) < 501:
        await asyncio.sleep(0)
        turns += 1
    assert turns >= 250
    pacer.close()


async def test_one_that_raises_leaves_the_others_their_turn() -> None:
    loop, seen = asyncio.get_running_loop(), []
    loop.set_exception_handler(lambda _, context: seen.append(context["exception"]))
    pacer = Pacer(loop.time)

    class Broken(Sleeper):
        def wake(self) -> None:
            raise RuntimeError("a bug")

    broken, before, after = Broken(pacer), Sleeper(pacer, [0.0]), Sleeper(pacer)
    before.sleep(here() - 0.003)
    broken.sleep(here() - 0.002)
    after.sleep(here() - 0.001)
    await until(lambda: len(before.woken) == 2 and len(after.woken) == 1)
    assert len(seen) == 1
    pacer.check()
    pacer.close()


async def test_nobody_is_woken_after_close() -> None:
    pacer = Pacer(asyncio.get_running_loop().time)
    sleeper = Sleeper(pacer)
    sleeper.sleep(here() + 0.001)
    pacer.close()
    sleeper.sleep(here() + 0.001)
    await elapse(0.005)
    assert not sleeper.woken
    pacer.check()


async def test_the_pace_slackens_while_the_loop_is_behind_and_recovers() -> None:
    late_s = 0.0
    loop = asyncio.get_running_loop()
    pacer = Pacer(lambda: loop.time() + late_s)
    assert pacer.pace_s == PACE_S
    late_s = 0.04
    sleeper = Sleeper(pacer, [0.0] * 60)
    sleeper.sleep(here())
    await until(lambda: len(sleeper.woken) == 61)
    assert 0.1 < pacer.pace_s <= MAX_PACE_S
    late_s = 0.0
    sleeper.naps = [0.0003] * 60
    sleeper.sleep(here())
    await until(lambda: len(sleeper.woken) == 122)
    assert pacer.pace_s == PACE_S
    pacer.close()
