"""Replays in several processes at once.

Each process does one replay after the other. If one dies (killed for its memory, say), the replay it was
at is reported as failed, another process takes its place, and the rest goes on. What comes out does not
depend on the number of processes, nor on their speed.
"""

import contextlib
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from mallee.mocker.replay.config import ReplayConfig
from mallee.mocker.replay.result import Result
from mallee.protocol.errors import MalleeError
from mallee.traces.workload import Workload

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess

_QUANTILES: Final = 1001


class Job(NamedTuple):
    """One replay. `make` and `config` are sent to another process: a `partial` of a function will do."""

    make: Callable[[], Workload]
    config: ReplayConfig


class Run(NamedTuple):
    """The part of a replay's result that is kept.

    `ttft_ms`: quantiles 0, 0.001, .. 1; infinite for what never began.
    """

    summary: dict[str, Any]
    conditions: dict[str, Any]
    ttft_ms: npt.NDArray[np.float64]

    def ttft_at(self, share: float) -> float:
        """The time to first token that `share` of all requests don't exceed, in ms."""
        return float(self.ttft_ms[round(share * (_QUANTILES - 1))])


class Failed(NamedTuple):
    """The error of a replay without a result."""

    error: str


Done: TypeAlias = Run | Failed


@dataclass(slots=True, eq=False)
class _Child:
    process: "BaseProcess"
    connection: "Connection[Any, Any]"
    job: int


def keep(result: Result) -> Run:
    """The part of a result that comparisons need."""
    columns = result.columns
    ttft = 1000 * (columns.first_s - columns.arrival_s)
    lost = np.full(result.summary["lost"], np.inf)
    ttft = np.concatenate((np.where(np.isnan(ttft), np.inf, ttft), lost))
    shares = np.linspace(0.0, 1.0, _QUANTILES)
    # As the summary interpolates; but nothing lies between a number and infinity.
    method: Literal["linear", "higher"] = "linear" if np.isfinite(ttft).all() else "higher"
    quantiles = np.quantile(ttft, shares, method=method) if len(ttft) else np.empty(0)
    return Run(result.summary, result.conditions, quantiles)


def do(job: Job) -> Done:
    """One replay, here."""
    from mallee.mocker.replay.run import replay

    try:
        return keep(replay(job.make(), job.config))
    except MalleeError as error:
        return Failed(str(error))


def run_jobs(
    jobs: Sequence[Job],
    *,
    processes: int,
    on_done: Callable[[int, Done], None] = lambda index, done: None,
) -> list[Done]:
    """The outcomes in the order of `jobs`.

    `on_done(index, outcome)` is called for each as it comes, in any order. With one process
    (or one job) everything is done in this one.
    """
    if min(processes, len(jobs)) <= 1:
        found: list[Done] = []
        for index, job in enumerate(jobs):
            found.append(do(job))
            on_done(index, found[-1])
        return found
    outcomes: dict[int, Done] = {}

    def done(index: int, outcome: Done) -> None:
        outcomes[index] = outcome
        on_done(index, outcome)

    _Pool(jobs, done).run(min(processes, len(jobs)))
    return [outcomes[index] for index in range(len(jobs))]


class _Pool:
    """Children and the jobs that are left for them."""

    def __init__(self, jobs: Sequence[Job], done: Callable[[int, Done], None]) -> None:
        import multiprocessing  # loads sockets, so not before they are needed

        self._context = multiprocessing.get_context("spawn")
        self._jobs = jobs
        self._done = done
        self._next = 0
        self._children: list[_Child] = []

    def run(self, processes: int) -> None:
        from multiprocessing.connection import wait

        try:
            for _ in range(processes):
                self._start()
            while self._children:
                ready = set(wait([child.connection for child in self._children]))
                for child in [c for c in self._children if c.connection in ready]:
                    self._receive(child)
        finally:
            for child in self._children:
                child.process.terminate()
                child.process.join()

    def _start(self) -> None:
        """Start a child with the next job, if there is one."""
        if self._next == len(self._jobs):
            return
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=serve, args=(theirs,), daemon=True)
        # Ctrl-C reaches the whole group; this process ends its children, without their tracebacks.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        child = _Child(process, ours, -1)
        self._children.append(child)
        self._give(child)

    def _give(self, child: _Child) -> None:
        child.job, self._next = self._next, self._next + 1
        # If it died already, reading from it will say so.
        with contextlib.suppress(BrokenPipeError):
            child.connection.send(self._jobs[child.job])

    def _receive(self, child: _Child) -> None:
        try:
            outcome = child.connection.recv()
        except (EOFError, ConnectionResetError):
            self._buried(child)
            return
        self._done(child.job, outcome)
        if self._next < len(self._jobs):
            self._give(child)
        else:
            self._retire(child)

    def _retire(self, child: _Child) -> None:
        self._children.remove(child)
        child.connection.close()
        child.process.join()

    def _buried(self, child: _Child) -> None:
        """Report the job of a child that died, and start another child."""
        self._retire(child)
        code = child.process.exitcode
        how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        self._done(child.job, Failed(f"the process that simulated it died ({how})"))
        self._start()


def serve(connection: "Connection[Any, Any]") -> None:
    """Do jobs, in a child process, until the pipe is closed."""
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            connection.send(do(connection.recv()))
