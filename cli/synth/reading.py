"""Reading of traces by the commands of `mallee synth`, and the end of a command on wrong input."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import wraps
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple, cast

import typer
from rich.console import Console
from rich.markup import escape

from mallee.cli.options import (
    BlockSizeOption,
    IdTokensOption,
    KindOption,
    count,
    one_of,
    with_groups,
)
from mallee.cli.output import fail
from mallee.protocol.errors import CodecError, ConfigError

if TYPE_CHECKING:
    from rich.status import Status

    from mallee.traces.files.problems import Problems
    from mallee.traces.trace import Rule, Trace
    from mallee.traces.workload import Request, Workload

_STRIDE: Final = 1024  # requests from one showing of their number to the next


@dataclass(frozen=True, slots=True)
class Reading:
    """Options of reading a trace."""

    kind: KindOption = "auto"
    id_tokens: IdTokensOption = None
    block_size: BlockSizeOption = None
    rule: Annotated[
        str,
        typer.Option(
            help="ceil: partial last blocks count, floor: they don't; auto: as the trace has it."
        ),
    ] = "auto"
    read_requests: Annotated[int | None, typer.Option(help="Read only so many requests.")] = None
    strict: Annotated[bool, typer.Option("--strict", help="A malformed line is an error.")] = False
    keep_ticks: Annotated[
        bool,
        typer.Option("--keep-ticks", help="Keep timestamps that were cut to 3 s ticks."),
    ] = False
    read_seed: Annotated[
        int,
        typer.Option(
            help="Seed of arrivals inside ticks, and of the beginnings of recorded sessions and trees."
        ),
    ] = 1


def reads_traces(command: Callable[..., None]) -> Callable[..., None]:
    """`command` with the options of `Reading`; errors in options and files end it with one line and status 2.

    `read_requests` is `--requests` of commands that have no other option of that name.
    """
    limit = "read_requests" if "requests" in signature(command).parameters else "requests"
    command = with_groups(command, {"read_requests": limit})

    @wraps(command)
    def run(**given: Any) -> None:
        try:
            count(limit.replace("_", "-"), given[limit])
            command(**given)
        except (ConfigError, CodecError) as error:
            fail(str(error))

    return run


class Source(NamedTuple):
    """A trace file, read."""

    workload: "Workload"
    trace: "Trace"
    problems: "Problems"


def open_source(path: Path, reading: Reading) -> tuple["Workload", "Problems"]:
    """The file's requests; malformed lines are counted while it is read, or raised if `strict`.

    Raises ConfigError, CodecError.
    """
    from mallee.traces.files.problems import Problems
    from mallee.traces.read import read_workload

    problems = Problems()
    workload = read_workload(
        path,
        kind=reading.kind,
        limit=reading.read_requests,
        spread_ticks=not reading.keep_ticks,
        id_tokens=reading.id_tokens,
        seed=reading.read_seed,
        problems=None if reading.strict else problems,
    )
    return workload, problems


def read_source(path: Path, reading: Reading, shown: "Status") -> Source:
    """`open_source`, read as a whole; `shown` counts the requests, faults of lines go to stderr.

    Raises ConfigError (also if no line could be used), CodecError (also if its ids are no prefix tree).
    """
    from mallee.synth.core.prefix_tree import require_tree
    from mallee.traces.trace import trace_of

    workload, problems = open_source(path, reading)
    counted = counting(workload, shown, "read")
    trace = trace_of(counted, block_size=reading.block_size, rule=rule_of(reading))
    require_requests(path, len(trace), problems)
    print_problems(path, problems)
    require_tree(workload, trace)
    return Source(workload, trace, problems)


def require_requests(path: Path, requests: int, problems: "Problems") -> None:
    """Raises ConfigError if there are none."""
    if not requests:
        first = f"; the first: {problems.kept[0]}" if problems.kept else ""
        raise ConfigError(f"trace {path}: there are no requests in it{first}")


def rule_of(reading: Reading) -> "Rule":
    """Raises ConfigError."""
    from mallee.traces.trace import Rule

    return cast("Rule", one_of("rule", reading.rule, Rule))


def print_problems(path: Path, problems: "Problems") -> None:
    """Print faults of a file's lines on stderr, the first few each."""
    if not problems:
        return
    console = Console(stderr=True, highlight=False)
    console.print(f"[yellow]{escape(path.name)}:[/] {escape(problems.summary())}", soft_wrap=True)
    for problem in problems.kept:
        console.print(f"  {escape(str(problem))}", soft_wrap=True)
    if len(problems) > len(problems.kept):
        console.print(f"  and {len(problems) - len(problems.kept)} more")


def waiting(what: str) -> AbstractContextManager["Status"]:
    """A spinner with `what` beside it, if stderr is a terminal."""
    return Console(stderr=True).status(escape(what))


def counting(workload: "Workload", shown: "Status", done: str) -> "Workload":
    """`workload`, with the number of requests that are `done` so far in `shown`."""

    def read() -> "Iterator[Request]":
        for number, request in enumerate(workload):
            if not number % _STRIDE:
                shown.update(f"{escape(workload.name)}: {number:,} requests {done} ...")
            yield request

    return replace(workload, read=read)
