"""Mocked engines of one process: one timer for all, a device that some share, the wall clock's pace."""

import asyncio
import random
import time
from pathlib import Path
from typing import Any

import pytest

from mallee.actors.mock.device import LiveDevice
from mallee.actors.mock.fleet import device_of
from mallee.actors.mock.pacer import GRAIN_S, MAX_PACE_S, PACE_S, Pacer
from mallee.gateway.requests.request import RunningRequest
from mallee.mocker.device import DeviceConfig
from mallee.mocker.timing import Fixed, Timing
from mallee.protocol.hashing import as_tokens
from mallee.protocol.messages import Limits
from mallee.router.dispatch.jobs import GenerateJob
from support.mock_scene import MockScene, make_folder, mock_config, mocked
from support.virtual.loop import virtual_loop
from support.waiting import elapse, until

STEP_S = 0.01


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("tiny"))


class Notes:
    """A tenant that begins one more piece of work at the end of its first."""

    def __init__(self, device: LiveDevice, work_s: float) -> None:
        self.device = device
        self.work_s = work_s
        self.ends: list[float] = []

    def device_done(self, at: float) -> None:
        self.ends.append(at)
        if len(self.ends) == 1:
            self.device.begin(self, at, self.work_s)


async def test_ends_have_the_times_of_the_device_not_those_of_the_loop() -> None:
    """S18, part: two tenants, whole steps in turn; a loop that is late delays no schedule."""
    pacer = Pacer(time.monotonic)
    device = LiveDevice(DeviceConfig(2, slice_s=1.0, switch_s=0.0), pacer, time.monotonic)
    one, two = Notes(device, STEP_S), Notes(device, STEP_S)
    begun = time.monotonic()
    device.begin(one, begun, STEP_S)
    device.begin(two, begun, STEP_S)
    device.check()
    virtual_loop().fall_behind(0.025)
    await until(lambda: len(one.ends) == len(two.ends) == 2)
    assert one.ends == pytest.approx([begun + STEP_S, begun + 3 * STEP_S])
    assert two.ends == pytest.approx([begun + 2 * STEP_S, begun + 4 * STEP_S])
    device.leave(one)
    device.leave(one)
    pacer.close()


async def decoded_s(scene: MockScene, num: int, max_tokens: int) -> float:
    """Seconds for so many answers at once, an engine each."""

    async def one(i: int) -> int:
        prompt = as_tokens([(i * 31 + j) % 300 + 1 for j in range(40)])
        job = GenerateJob(prompt, Limits(max_tokens, ignore_eos=True))
        stream: RunningRequest = await scene.gateway.requests.start(job)
        return sum([len(delta.tokens) async for delta in stream])

    begun = time.monotonic()
    assert await asyncio.gather(*(one(i) for i in range(num))) == [max_tokens] * num
    return time.monotonic() - begun


async def test_engines_on_one_device_take_as_many_times_as_long(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S18, part: over a gateway; three engines, one token each a step, by turns on one device."""
    timing = Timing(Fixed(STEP_S, STEP_S))
    monkeypatch.setattr("mallee.actors.mock.fleet.timing_of", lambda config: timing)
    settings = {"routing__policy": "round_robin", "mock__engines_per_worker": 3}
    took = {}
    for share in (1, 3):
        config = mock_config(
            folder,
            mock__speedup=1.0,
            mock__engines_per_device=share,
            mock__device_slice_ms=1000.0,
            **settings,
        )
        async with mocked(config) as scene:
            took[share] = await decoded_s(scene, 3, 20)
            scene.fleet.check()
    assert took == pytest.approx({1: 20 * STEP_S, 3: 60 * (STEP_S + DeviceConfig(1).switch_s)})


async def test_a_crash_frees_the_shared_device_and_a_new_life_uses_it(folder: Path) -> None:
    """S18, part."""
    config = mock_config(
        folder, mock__speedup=1.0, mock__engines_per_worker=2, mock__engines_per_device=2
    )
    async with mocked(config) as scene:
        answers = asyncio.create_task(decoded_s(scene, 4, 12))
        await elapse(0.05)
        await scene.fleet.crash("w0")
        scene.fleet.join("w0")
        await answers
        await until(lambda: len(scene.names()) == 2)
        await decoded_s(scene, 4, 3)
        scene.fleet.check()


def test_a_fleet_that_takes_no_time_shares_no_device(folder: Path) -> None:
    shared = {"mock__engines_per_worker": 4, "mock__engines_per_device": 4}
    assert device_of(mock_config(folder, mock__speedup=0.0, **shared)) is None
    fast = device_of(mock_config(folder, mock__speedup=10.0, mock__device_slice_ms=5.0, **shared))
    assert fast is not None
    assert fast.slice_s == pytest.approx(0.0005)


class Sleeper:
    """Notes when it was woken; sleeps again if `naps` are left, raises if it is broken."""

    def __init__(
        self, pacer: Pacer, naps: list[float] | None = None, *, is_broken: bool = False
    ) -> None:
        self.pacer = pacer
        self.naps = naps or []
        self.is_broken = is_broken
        self.due: float | None = None
        self.woken: list[float] = []

    def sleep(self, due: float) -> None:
        self.due = due
        self.pacer.at(due, self)

    def wake(self) -> None:
        assert self.due is not None
        assert here() >= self.due, "never early"
        self.woken.append(self.due)
        self.due = None
        if self.is_broken:
            raise RuntimeError("a bug")
        if self.naps:
            self.sleep(self.woken[-1] + self.naps.pop(0))


def here() -> float:
    return asyncio.get_running_loop().time()


@pytest.mark.parametrize("seed", range(20))
async def test_all_are_woken_at_the_last_times_that_they_asked_for(seed: int) -> None:
    """Once each; what raises leaves the others their turn, and after the end none has one."""
    rng, loop, bugs = random.Random(seed), asyncio.get_running_loop(), list[Any]()
    loop.set_exception_handler(lambda _, context: bugs.append(context["exception"]))
    pacer, begin = Pacer(loop.time), here()
    sleepers = [Sleeper(pacer, is_broken=rng.random() < 0.1) for _ in range(200)]
    wanted: list[list[float]] = []
    for sleeper in sleepers:
        for _ in range(rng.choice((1, 1, 2, 3))):
            sleeper.sleep(begin + 0.0001 * rng.randrange(-30, 200))
        if rng.random() < 0.1:
            sleeper.due = None  # it is gone
        wanted.append([] if sleeper.due is None else [sleeper.due])
    pacer.check()
    await until(lambda: [each.woken for each in sleepers] == wanted)
    await elapse(0.05)
    assert [each.woken for each in sleepers] == wanted
    num_broken = sum(each.is_broken and bool(each.woken) for each in sleepers)
    assert [str(bug) for bug in bugs] == ["a bug"] * num_broken
    assert pacer.stats().wakes <= 0.02 / GRAIN_S + 3 + num_broken
    sleepers[0].sleep(here() + 0.001)
    pacer.close()
    sleepers[1].sleep(here() + 0.001)
    await elapse(0.005)
    assert [each.woken for each in sleepers] == wanted
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
