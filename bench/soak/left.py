"""State of a plain service at rest: what requests and faults left behind, and the level of its memory."""

import asyncio
import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from bench.soak.plain import Child, Plain, Sample
from bench.soak.process import Report

REST_S: Final = 90.0  # in which a service that was left alone must be at rest
SETTLE_S: Final = 60.0  # after which memory must keep its level
WINDOW_S: Final = 30.0  # over which it is averaged
MAX_GROWTH: Final = 1.05
MAX_TASKS: Final = 1  # more than at the start: nats-py's for answers, from the first question on
MAX_FDS: Final = (
    7  # more than at the start: kept connections, a child per engine that tries grammars
)


class Level(NamedTuple):
    """Memory of a process, MB, after the first minute and at the end."""

    early: float
    late: float

    @property
    def growth(self) -> float:
        return self.late / self.early


def level(samples: Sequence[Sample]) -> Level | None:
    """Of the last life; None if it was too short to tell."""
    last = [each for each in samples if each.life == samples[-1].life]
    begin, end = (last[0].at, last[-1].at) if last else (0.0, 0.0)
    if end - begin < SETTLE_S + 2 * WINDOW_S:
        return None

    def mean(since: float) -> float:
        values = [each.rss_nbytes for each in last if since <= each.at <= since + WINDOW_S]
        return statistics.fmean(values) / 1e6

    return Level(mean(begin + SETTLE_S), mean(end - WINDOW_S))


async def reports(plain: Plain) -> dict[str, Report]:
    """Of each process."""
    found = await asyncio.gather(*(child.report() for child in plain.children))
    return dict(zip((child.name for child in plain.children), found, strict=True))


async def rest(plain: Plain, before: Mapping[str, Report]) -> tuple[list[str], float]:
    """Faults that are left once nothing changes any more, and the seconds until there are none."""
    begin = time.monotonic()
    while True:
        found = faults(plain, before, await reports(plain))
        seconds = time.monotonic() - begin
        if not found or seconds > REST_S:
            return found, seconds
        await asyncio.sleep(0.5)


def faults(plain: Plain, before: Mapping[str, Report], now: Mapping[str, Report]) -> list[str]:
    """Differences between `now` and a service at rest."""
    found = []
    for name, report in now.items():
        counts = ("num_running", "num_waiting", "num_booked", "kept")
        found += [f"{name}: {what} {n}" for what in counts if (n := getattr(report, what))]
        if report.broken:
            found.append(f"{name}: {report.broken}")
        more = Counter(report.tasks) - Counter(before[name].tasks)
        if more.total() > MAX_TASKS:
            found.append(f"{name}: tasks {dict(more)}")
        opened = Counter(report.fds) - Counter(before[name].fds)
        if opened.total() > MAX_FDS:
            found.append(f"{name}: descriptors {dict(opened)}")
    for gateway in plain.gateways:
        for engines in plain.engines:
            found += _disagreements(gateway, now[gateway.name], engines, now[engines.name])
    return found


def _disagreements(gateway: Child, known: Report, engines: Child, true: Report) -> list[str]:
    """Blocks and capsules that a gateway knows of and its workers don't, and blocks the other way round."""
    found = []
    for worker, digest in true.digests.items():
        where = f"{gateway.name} of {worker} in {engines.name}"
        if known.digests.get(worker) != digest:
            found.append(f"{where}: blocks")
        # One that was made again elsewhere and let go there is unknown, though its first worker has it.
        if extra := set(known.capsules.get(worker, ())) - set(true.capsules[worker]):
            found.append(f"{where}: capsules {sorted(extra)[:3]}")
    return found
