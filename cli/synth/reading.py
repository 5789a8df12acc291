"""Reading of traces by the commands of `mallee synth`, and the end of a command on wrong input."""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple, cast, get_args, get_type_hints

import typer
from rich.console import Console
from rich.markup import escape

from mallee.cli.options import BlockSizeOption, IdTokensOption, KindOption, count, fail
from mallee.protocol.errors import CodecError, ConfigError

if TYPE_CHECKING:
    from rich.status import Status

    from mallee.traces.files.problems import Problems
    from mallee.traces.trace import Rule, Trace
    from mallee.traces.workload import Request, Workload

_TABLE_WIDTH: Final = 100
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
    """`command` with the options of `Reading` in place of its parameter `reading`.

    `read_requests` is `--requests` of commands that have no other option of that name.
    """
    signature = inspect.signature(command)
    name_of_limit = "read-requests" if "requests" in signature.parameters else "requests"
    added = []
    for each in fields(Reading):
        hint = get_type_hints(Reading, include_extras=True)[each.name]
        if each.name == "read_requests":
            option = typer.Option(f"--{name_of_limit}", help="Read only so many requests.")
            hint = Annotated[int | None, option]
        parameter = inspect.Parameter(
            each.name, inspect.Parameter.KEYWORD_ONLY, default=each.default, annotation=hint
        )
        added.append(parameter)

    @wraps(command)
    def wrapped(**values: Any) -> None:
        reading = Reading(**{each.name: values.pop(each.name) for each in fields(Reading)})
        with wrong_input_ends():
            count(name_of_limit, reading.read_requests)
        command(**values, reading=reading)

    own = [each for each in signature.parameters.values() if each.name != "reading"]
    own = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in own]
    hints = get_type_hints(command, include_extras=True) | {p.name: p.annotation for p in added}
    hints.pop("reading")
    wrapped.__dict__["__signature__"] = signature.replace(parameters=[*own, *added])
    wrapped.__annotations__ = hints
    return wrapped


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


def read_source(path: Path, reading: Reading, shown: "Status | None" = None) -> Source:
    """`open_source`, read as a whole; faults of its lines go to stderr.

    `shown`, of `waiting`, counts the requests. Raises ConfigError (also if no line could be used),
    CodecError (also if its ids are no prefix tree).
    """
    from mallee.synth.core.prefix_tree import require_tree
    from mallee.traces.trace import trace_of

    workload, problems = open_source(path, reading)
    read = workload if shown is None else _counted(workload, shown)
    trace = trace_of(read, block_size=reading.block_size, rule=rule_of(reading))
    if not len(trace):
        first = f"; the first: {problems.kept[0]}" if problems.kept else ""
        raise ConfigError(f"trace {path}: there are no requests in it{first}")
    print_problems(path, problems)
    require_tree(workload, trace)
    return Source(workload, trace, problems)


def rule_of(reading: Reading) -> "Rule":
    """Raises ConfigError."""
    from mallee.traces.trace import Rule

    if reading.rule not in get_args(Rule):
        raise ConfigError(f"--rule={reading.rule}: give one of {', '.join(get_args(Rule))}")
    return cast("Rule", reading.rule)


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


def text_console(*, is_error: bool) -> Console:
    """A console on stdout or stderr, as wide as our tables if it is no terminal."""
    console = Console(stderr=is_error, highlight=False)
    if not console.is_terminal:
        console.width = _TABLE_WIDTH
    return console


@contextmanager
def wrong_input_ends() -> Iterator[None]:
    """Errors in options and files end the command with one line and status 2."""
    try:
        yield
    except (ConfigError, CodecError) as error:
        fail(str(error))


@contextmanager
def waiting(what: str) -> "Iterator[Status | None]":
    """A spinner with `what` beside it, if stderr is a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    with Console(stderr=True).status(escape(what)) as shown:
        yield shown


def _counted(workload: "Workload", shown: "Status") -> "Workload":
    """`workload`, with the number of requests read so far in `shown`."""

    def read() -> "Iterator[Request]":
        number = 0
        for number, request in enumerate(workload, 1):
            if not number % _STRIDE:
                shown.update(f"reading {escape(workload.name)}: {number:,} requests")
            yield request
        shown.update(f"{escape(workload.name)}: {number:,} requests read ...")

    return replace(workload, read=read)
