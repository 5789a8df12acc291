"""A device that several engines share, alone and under a fleet."""

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.doubles.workloads import made
from mallee.mocker.device import DeviceConfig, Done, SharedDevice
from mallee.mocker.replay.config import ReplayConfig
from mallee.mocker.replay.fleet.faults import Crash
from mallee.mocker.replay.result import Result
from mallee.mocker.replay.run import replay
from mallee.mocker.replay.simulation import Simulation
from mallee.mocker.timing import Fixed, Timing
from mallee.traces.workload import Request, Workload


def ends(device: SharedDevice) -> list[Done]:
    """All ends, in order."""
    found = []
    while device.due < inf:
        if (done := device.pop(device.due)) is not None:
            found.append(done)
        device.check()
    return found


@pytest.mark.parametrize(
    ("slice_s", "switch_s", "pieces", "ended"),
    [
        (1.0, 0.5, [(1, 3.0, 10.0)], [Done(1, 13.0)]),  # alone
        (1.0, 0.0, [(1, 0.0, 3.0), (2, 0.0, 2.0)], [Done(2, 4.0), Done(1, 5.0)]),  # by turns
        # A change of tenant takes time.
        (1.0, 0.25, [(1, 0.0, 2.0), (2, 0.0, 1.0)], [Done(2, 2.25), Done(1, 3.5)]),
        # A newcomer waits for the end of the present slice only.
        (2.0, 0.0, [(1, 0.0, 100.0), (2, 31.0, 1.0)], [Done(2, 33.0), Done(1, 101.0)]),
        # Endless slices run whole pieces in order.
        (
            *(inf, 0.0, [(1, 0.0, 3.0), (2, 0.0, 1.0), (3, 0.0, 2.0)]),
            [Done(1, 3.0), Done(2, 4.0), Done(3, 6.0)],
        ),
    ],
)
def test_pieces_of_work_take_turns_slice_by_slice(
    slice_s: float, switch_s: float, pieces: list[tuple[int, float, float]], ended: list[Done]
) -> None:
    device = SharedDevice(DeviceConfig(3, slice_s=slice_s, switch_s=switch_s))
    for piece in pieces:
        device.begin(*piece)
    assert device.pop(ended[0].at - 0.1) is None
    assert ends(device) == ended
    stats = device.stats()
    assert stats.busy_s == sum(seconds for _, _, seconds in pieces)
    last, at = ended[-1]
    device.begin(last, at, 1.0)  # the same tenant again: no change
    assert ends(device) == [Done(last, at + 1.0)]
    assert device.stats().switching_s == stats.switching_s


def test_work_of_a_tenant_that_leaves_is_forgotten() -> None:
    device = SharedDevice(DeviceConfig(4, slice_s=1.0, switch_s=0.0))
    for tenant in (1, 2, 3):
        device.begin(tenant, 0.0, 2.0)
    device.begin(4, 50.0, 1.0)
    assert device.pop(0.5) is None
    device.leave(1, 0.5)  # it runs
    device.leave(3, 0.5)  # it waits
    device.leave(4, 0.5)  # it is yet to come
    device.check()
    assert ends(device) == [Done(2, 2.5)]


@given(
    st.lists(st.tuples(st.floats(0, 20), st.floats(0, 9)), min_size=1, max_size=8),
    st.sampled_from([0.25, 1.0, 3.0, inf]),
    st.sampled_from([0.0, 0.125]),
)
def test_no_work_is_lost_or_done_twice(
    pieces: list[tuple[float, float]], slice_s: float, switch_s: float
) -> None:
    """A device is never idle while there is work, and its time is work and changes."""
    device = SharedDevice(DeviceConfig(8, slice_s, switch_s))
    for tenant, (at, seconds) in enumerate(pieces):
        device.begin(tenant, at, seconds)
    found = ends(device)
    assert sorted(done.tenant for done in found) == list(range(len(pieces)))
    stats = device.stats()
    assert stats.busy_s == pytest.approx(sum(seconds for _, seconds in pieces))
    assert stats.switching_s == pytest.approx(switch_s * stats.num_switches)
    for tenant, at in found:
        assert at >= pieces[tenant][0] + pieces[tenant][1] - 1e-9
    begun = min(at for at, _ in pieces)
    arrived = max(at for at, _ in pieces)
    total_s = stats.busy_s + stats.switching_s
    assert begun + total_s - 1e-9 <= found[-1].at <= arrived + total_s + 1e-9


# Under a fleet

STEPS = Timing(Fixed(0.010, 0.010), overhead_s=0.002)


def scene(num: int = 8, output_tokens: int = 20) -> Workload:
    """So many requests at once."""
    requests = [Request(i, 0.0, range(i * 4, i * 4 + 4), 64, output_tokens) for i in range(num)]
    return made(requests, name="scene", id_tokens=16)


def run(engines: int, config: DeviceConfig, **more: object) -> Result:
    replay_config = ReplayConfig(
        engines=engines,
        kv_tokens=4096,
        timing=STEPS,
        policy="round_robin",
        device=config,
        **more,  # type: ignore[arg-type]
    )
    simulation = Simulation(scene(), replay_config)
    simulation.run()
    simulation.check()
    return replay(scene(), replay_config)


def test_engines_on_one_device_run_in_turn_but_for_what_needs_no_device() -> None:
    """S18, part: k engines with steps of 10 ms and 2 ms of their own: 10 k ms a token, not 12 k.

    One engine on a device is an engine as before, multi-steps and all.
    """
    for k in (1, 2, 4):
        shared = run(k, DeviceConfig(max(k, 2), slice_s=inf, switch_s=0.0)).summary
        own = run(k, DeviceConfig(1)).summary
        assert own["devices"] is None
        assert own["itl_ms"]["p50"] == pytest.approx(12.0, rel=0.03)
        if k == 1:
            assert shared["duration_s"] == pytest.approx(own["duration_s"])
            assert shared["itl_ms"]["p50"] == pytest.approx(own["itl_ms"]["p50"])
            continue
        assert shared["itl_ms"]["p50"] == pytest.approx(10.0 * k, rel=0.03)
        assert shared["devices"]["busy"] > 0.9
        assert (shared["errors"], shared["lost"]) == ({}, 0)


def test_changes_of_engines_are_paid_and_shorter_slices_change_more() -> None:
    """S18, part."""
    free = run(4, DeviceConfig(4, slice_s=0.002, switch_s=0.0)).summary
    paid = run(4, DeviceConfig(4, slice_s=0.002, switch_s=0.0005)).summary
    whole = run(4, DeviceConfig(4, slice_s=inf, switch_s=0.0005)).summary
    assert free["duration_s"] < whole["duration_s"] < paid["duration_s"]
    assert whole["devices"]["num_switches"] < paid["devices"]["num_switches"] / 3
    assert paid["devices"]["switching"] > 0.1


def test_a_crash_of_an_engine_gives_its_slices_to_the_others() -> None:
    """S18, part: all requests are answered by the engines that are left."""
    crash = Crash(0.1, "w1")
    found = run(3, DeviceConfig(3), faults=(crash,)).summary
    assert (found["lost"], found["errors"]) == (0, {})
    assert found["retries"] > 0
