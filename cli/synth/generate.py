"""`mallee synth generate`: learns a trace and writes another one like it."""

import hashlib
import json
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple

import typer
from rich.console import Console
from rich.markup import escape

from mallee.cli.options import JsonOption, count, one_of
from mallee.cli.synth.check import STDOUT, check_files, check_learned, check_loop
from mallee.cli.synth.reading import Reading, counting, read_source, waiting
from mallee.protocol.errors import ConfigError

if TYPE_CHECKING:
    from mallee.synth.core.model import Model
    from mallee.traces.workload import Workload

_ALSO_STDOUT: Final = (Path("/dev/stdout"), Path("/dev/fd/1"), Path("/proc/self/fd/1"))


class _Learned(NamedTuple):
    """A model, and how it came about."""

    model: "Model"
    source: str
    requests: int | None = None  # of its source, if that was read


def generate(
    out: Annotated[
        Path, typer.Option("--to", help="File to write: .jsonl, .gz or .zst; -: stdout.")
    ],
    source: Annotated[
        Path | None, typer.Option("--from", help="A trace, or a file of --save-model.")
    ] = None,
    program: Annotated[
        str | None, typer.Option(help="Without a source: searches by bfs, dfs or mcts, or a swarm.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="tree: the published baseline; session (default): how agents really go on."
        ),
    ] = None,
    requests: Annotated[
        int | None, typer.Option(help="How many; as many as the source by default.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Same seed, same bytes.")] = 0,
    format: Annotated[
        str | None,
        typer.Option(
            help="mooncake (open loop), agentic (with dependencies) or dag (aiperf's text);"
            " by default mooncake of a tree model, agentic of others."
        ),
    ] = None,
    open_loop: Annotated[
        bool | None,
        typer.Option(
            "--open-loop/--closed-loop",
            help="Arrival times alone, or requests that wait for others; by default as the format has it.",
        ),
    ] = None,
    prefix_len: Annotated[float, typer.Option(help="Shared text is so many times as long.")] = 1.0,
    prefix_root: Annotated[int, typer.Option(help="Disjoint families of sessions.")] = 1,
    prompt_len: Annotated[float, typer.Option(help="Requests' own text, so many times.")] = 1.0,
    osl: Annotated[float, typer.Option(help="Answers are so many times as long.")] = 1.0,
    speedup: Annotated[float, typer.Option(help="Arrivals come so much faster.")] = 1.0,
    save_model: Annotated[
        Path | None, typer.Option(help="Keep what was learned here, for --from.")
    ] = None,
    as_json: JsonOption = False,
    *,
    reading: Reading,
) -> None:
    """Learn a trace and write a new one that behaves like it.

    Example: mallee synth generate --from trace.jsonl --to more.jsonl --requests 10000
    """
    import msgspec

    from mallee.synth.core.knobs import AS_LEARNED, Knobs
    from mallee.synth.core.model import Kind
    from mallee.synth.core.streams import check_seed
    from mallee.traces.write import Format, write_workload

    out = STDOUT if out in _ALSO_STDOUT else out
    knobs = Knobs(prefix_len, prefix_root, prompt_len, osl, speedup).validate()
    check_seed(seed)
    one_of("model", model, Kind)
    one_of("format", format, Format)
    count("requests", requests)
    check_files(source, out, save_model)
    if program is not None and save_model is not None:
        raise ConfigError("--save-model: programs are not learned; give --program again instead")
    begun = time.perf_counter()
    learned = _learned(source, program, model, reading)
    learn_s = time.perf_counter() - begun
    num = requests or learned.requests
    if num is None:
        raise ConfigError(f"{learned.source}: it has no number of requests; give --requests")
    workload = learned.model.generate(requests=num, seed=seed, knobs=knobs)
    kind = learned.model.kind
    format = format or ("mooncake" if kind == "tree" else "agentic")
    check_loop(format, open_loop)
    if save_model is not None:
        _save(learned.model, save_model)
    begun = time.perf_counter()
    if open_loop and format == "agentic":
        workload = _opened(workload)
    with waiting(f"generating {num:,} requests ...") as shown:
        counted = counting(workload, shown, f"of {num:,} written")
        written = write_workload(counted, out, format=format, block_size=reading.block_size)
    write_s = time.perf_counter() - begun
    summary = {
        "source": learned.source,
        "model": kind,
        "seed": seed,
        "knobs": {k: v for k, v in asdict(knobs).items() if v != getattr(AS_LEARNED, k)},
        "format": format,
        "block_size": reading.block_size or workload.id_tokens,
        "out": str(out),
        **msgspec.to_builtins(written),
        "learn_s": round(learn_s, 3),
        "write_s": round(write_s, 3),
        "requests_per_min": round(60 * num / write_s),
        "sha256": _digest(out),
    }
    _show(summary, out, as_json=as_json)


def _learned(
    source: Path | None, program: str | None, kind: str | None, reading: Reading
) -> _Learned:
    """From one of a trace, a saved model, a program. Raises ConfigError, CodecError."""
    from mallee.synth.fit import fit
    from mallee.synth.programs.named import PROGRAMS
    from mallee.synth.saved import is_model, load_model

    if (source is None) == (program is None):
        raise ConfigError("give --from a trace or a saved model, or else --program")
    if program is not None:
        name = f"program {program}"
        rule = PROGRAMS[str(one_of("program", program, PROGRAMS))]
        check_learned(name, rule.kind, kind, reading)
        return _Learned(rule, name)
    assert source is not None
    if is_model(source):
        model = load_model(source)
        check_learned(str(source), model.kind, kind, reading)
        return _Learned(model, str(source))
    with waiting(f"learning {source.name} ...") as shown:
        trace = read_source(source, reading, shown).trace
        return _Learned(fit(trace, kind or "session"), str(source), len(trace))


def _save(model: "Model", path: Path) -> None:
    """Says what a reader of the file will know of the trace."""
    from mallee.synth.saved import PRIVACY_NOTE, save_model

    save_model(model, path)
    sys.stderr.write(f"wrote {path}: {PRIVACY_NOTE}\n")


def _opened(workload: "Workload") -> "Workload":
    """The same arrivals without waits. Raises ConfigError for forks."""
    from msgspec.structs import replace as changed

    if workload.has_forks:
        raise ConfigError("--open-loop: forks wait for their parents; add --format mooncake")
    return replace(
        workload,
        read=lambda: (changed(each, wait_for=(), tool_wait_s=0.0) for each in workload),
    )


def _digest(out: Path) -> str | None:
    """SHA-256 of the file; None for a stream."""
    if out == STDOUT or not out.is_file():
        return None
    with out.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _show(summary: dict[str, Any], out: Path, *, as_json: bool) -> None:
    """A line for people; with `as_json` an object, too: on stdout, unless the trace itself went there."""
    console = Console(stderr=as_json or out == STDOUT, highlight=False)
    console.print(
        f"[bold]{escape(str(out))}[/]: {summary['requests']:,} requests as {summary['format']},"
        f" {summary['model']} model of {escape(summary['source'])}, seed {summary['seed']};"
        f" learned in {summary['learn_s']:.1f} s, written in {summary['write_s']:.1f} s",
        soft_wrap=True,
    )
    if as_json:
        stream = sys.stderr if out == STDOUT else sys.stdout
        stream.write(json.dumps(summary, allow_nan=False) + "\n")
