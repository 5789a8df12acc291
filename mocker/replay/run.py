"""A whole replay in one call."""

import gc
import resource
import sys
import time
from collections.abc import Callable

from mallee.mocker.replay.config import ReplayConfig
from mallee.mocker.replay.result import Result, Wall, summarise
from mallee.mocker.replay.simulation import Simulation
from mallee.traces.workload import Workload


def replay(
    workload: Workload,
    config: ReplayConfig,
    *,
    wall_clock: Callable[[], float] = time.perf_counter,
) -> Result:
    """Replay `workload` on the fleet of `config`.

    The cyclic garbage collector is off meanwhile: reference counts free what a replay makes, and
    scanning a million live objects again and again would take longer than the replay. Raises
    ConfigError; CodecError of the workload.
    """
    begin = wall_clock()
    simulation = Simulation(workload, config)
    open_s = wall_clock() - begin
    was_on = gc.isenabled()
    gc.disable()
    begin = wall_clock()
    try:
        simulation.run()
    finally:
        wall_s = wall_clock() - begin
        if was_on:
            gc.enable()
    read_s = simulation.clients.read_s
    return summarise(workload, simulation, Wall(wall_s - read_s, read_s, open_s, peak_mb()))


def peak_mb() -> float:
    """The most memory that this process ever had, in MB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1e6 if sys.platform == "darwin" else 1e3 / 1.024)
