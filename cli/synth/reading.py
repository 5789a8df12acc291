"""What the commands of `mallee synth` share: how traces are read, and how wrong input ends them."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple, TypeAlias, cast, get_args

import typer
from rich.console import Console
from rich.markup import escape

from mallee.cli.options import fail
from mallee.protocol.errors import CodecError, ConfigError

if TYPE_CHECKING:
    from rich.status import Status

    from mallee.traces.problems import Problems
    from mallee.traces.trace import Trace
    from mallee.traces.workload import Request, Workload

_TABLE_WIDTH: Final = 100
_STRIDE: Final = 1024  # requests from one showing of their number to the next

KindOption: TypeAlias = Annotated[
    str,
    typer.Option(
        "--kind",
        help="mooncake, agentic, bailian, sessions, trees, dag or azure; auto: as it looks.",
    ),
]
IdTokensOption: TypeAlias = Annotated[
    int | None,
    typer.Option("--id-tokens", help="Tokens of an id of the trace; by default as its rows tell."),
]
BlockSizeOption: TypeAlias = Annotated[
    int | None,
    typer.Option("--block-size", help="Tokens of a block; as an id of the trace by default."),
]
RuleOption: TypeAlias = Annotated[
    str,
    typer.Option(
        "--rule",
        help="ceil: partial last blocks count, floor: they don't; auto: as the trace has it.",
    ),
]
LimitOption: TypeAlias = Annotated[
    int | None, typer.Option("--limit", help="Read only so many requests.")
]
StrictOption: TypeAlias = Annotated[
    bool, typer.Option("--strict", help="The first malformed line is an error.")
]
KeepTicksOption: TypeAlias = Annotated[
    bool,
    typer.Option("--keep-ticks", help="Leave timestamps that were cut to 3 s ticks as they are."),
]
ReadSeedOption: TypeAlias = Annotated[
    int,
    typer.Option(
        "--read-seed",
        help="Where in their tick rows arrive, and when recorded sessions and trees begin.",
    ),
]


class Source(NamedTuple):
    """A trace file as it was read."""

    workload: "Workload"
    trace: "Trace"
    problems: "Problems"


def open_source(
    path: Path,
    *,
    kind: str = "auto",
    id_tokens: int | None = None,
    limit: int | None = None,
    strict: bool = False,
    keep_ticks: bool = False,
    read_seed: int = 1,
) -> tuple["Workload", "Problems"]:
    """The file's requests; malformed lines are counted while it is read, or raised if `strict`.

    Raises ConfigError, CodecError.
    """
    from mallee.traces.problems import Problems
    from mallee.traces.read import read_workload

    problems = Problems()
    workload = read_workload(
        path,
        kind=kind,
        limit=limit,
        spread_ticks=not keep_ticks,
        id_tokens=id_tokens,
        seed=read_seed,
        problems=None if strict else problems,
    )
    return workload, problems


def read_source(
    path: Path,
    *,
    block_size: int | None = None,
    rule: str = "auto",
    shown: "Status | None" = None,
    **options: Any,
) -> Source:
    """`open_source`, read as a whole; what was wrong with its lines is told on stderr.

    How many requests have been read is told in `shown`, of `waiting`. Raises ConfigError (also if no
    line could be used), CodecError (also if its ids are no prefix tree).
    """
    from mallee.synth.core.prefix_tree import require_tree
    from mallee.traces.trace import Rule, trace_of

    if rule not in get_args(Rule):
        raise ConfigError(f"--rule={rule}: give one of {', '.join(get_args(Rule))}")
    workload, problems = open_source(path, **options)
    read = workload if shown is None else _counted(workload, shown)
    trace = trace_of(read, block_size=block_size, rule=cast("Rule", rule))
    if not len(trace):
        first = f"; the first: {problems.kept[0]}" if problems.kept else ""
        raise ConfigError(f"trace {path}: there are no requests in it{first}")
    tell(path, problems)
    require_tree(workload, trace)
    return Source(workload, trace, problems)


def tell(path: Path, problems: "Problems") -> None:
    """What was wrong with a file's lines, the first few by line, on stderr; nothing if nothing was."""
    if not problems:
        return
    console = Console(stderr=True, highlight=False)
    console.print(f"[yellow]{escape(path.name)}:[/] {escape(problems.summary())}", soft_wrap=True)
    for problem in problems.kept:
        console.print(f"  {escape(str(problem))}", soft_wrap=True)
    if len(problems) > len(problems.kept):
        console.print(f"  and {len(problems) - len(problems.kept)} more")


def text_console(*, is_error: bool) -> Console:
    """stdout, or stderr; as wide as our tables are where nobody looks."""
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
    """Something that moves, with `what` beside it, where somebody looks."""
    if not sys.stderr.isatty():
        yield None
        return
    with Console(stderr=True).status(escape(what)) as shown:
        yield shown


def _counted(workload: "Workload", shown: "Status") -> "Workload":
    """`workload`, telling how many of its requests have been read."""

    def read() -> "Iterator[Request]":
        number = 0
        for number, request in enumerate(workload, 1):
            if not number % _STRIDE:
                shown.update(f"reading {escape(workload.name)}: {number:,} requests")
            yield request
        shown.update(f"{escape(workload.name)}: {number:,} requests read ...")

    return replace(workload, read=read)
