"""Measures that panels draw and alerts bound: PromQL that has to be the same in both."""

from typing import Final

from mallee.actors.telemetry.boards.goals import SERVED
from mallee.actors.telemetry.boards.queries import Scope, share

ANSWERS: Final = "mallee_http_answers_total"


def failing(scope: Scope, *by: str) -> str:
    """The share of clients' requests that are answered with a server's error."""
    failed = scope.rate(ANSWERS, *by, where=f'{SERVED},status=~"5.."')
    return share(failed, scope.rate(ANSWERS, *by, where=SERVED))


def missing(scope: Scope) -> str:
    """The workers of those that should run that have no lease."""
    expected = scope.now("mallee_workers_expected", how="max")
    return f"{expected} - {scope.now('mallee_workers_alive', how='min')}"


def regret(scope: Scope, *by: str) -> str:
    """The share of the blocks that some worker had and the chosen one lacked."""
    lacked = scope.rate("mallee_route_regret_blocks_total", *by)
    return share(lacked, scope.rate("mallee_route_best_overlap_blocks_total", *by))


def in_use(scope: Scope) -> str:
    """The share of each worker's KV blocks that branches and capsules hold."""
    return scope.ratio("mallee_worker_live_blocks", "mallee_worker_total_blocks", "worker")


def kept_on_device(scope: Scope) -> str:
    """The share of the room of capsules on each device that they take, if they share nothing."""
    return scope.ratio(
        *("mallee_worker_capsule_bytes", "mallee_worker_capsule_limit_bytes", "worker"),
        where='tier="0"',
    )


def kept_in_host(scope: Scope) -> str:
    """The share of each worker's host memory that capsules hold."""
    held = scope.now("mallee_worker_host_held_blocks", "worker")
    return f"{held} / ({held} + {scope.now('mallee_worker_host_room_blocks', 'worker')})"


def kept_on_disk(scope: Scope) -> str:
    """The share of each worker's disk that capsules take, if they share nothing."""
    return _of_disk(scope, "mallee_worker_capsule_bytes", 'tier="2"')


def used_of_disk(scope: Scope) -> str:
    """The share of each worker's disk that is written."""
    return _of_disk(scope, "mallee_worker_tier_bytes", 'tier="disk"')


def open_files(scope: Scope) -> str:
    """The share of the files that each process may open that it has open."""
    return scope.ratio("process_open_fds", "process_max_fds", "instance")


def _of_disk(scope: Scope, name: str, where: str) -> str:
    """A gauge by the limit on disk, of workers that have one."""
    limit = scope.now("mallee_worker_disk_limit_bytes", "worker")
    return f"{scope.now(name, 'worker', where=where)} / ({limit} > 0)"
