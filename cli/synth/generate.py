"""`mallee synth generate`: learns a trace and writes another one like it."""

import json
import sys
import time
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.console import Console
from rich.markup import escape

from mallee.cli.options import JsonOption
from mallee.cli.synth.check import check_files, check_kind, check_loop, check_unread, check_words
from mallee.cli.synth.reading import Reading, read_source, reads_traces, waiting, wrong_input_ends
from mallee.cli.synth.writing import STDOUT, digest, plain_out, write
from mallee.protocol.errors import ConfigError

if TYPE_CHECKING:
    from mallee.synth.core.knobs import Knobs
    from mallee.synth.core.model import Model
    from mallee.traces.trace import Trace
    from mallee.traces.written import Written

_FORMATS: Final = {"tree": "mooncake", "session": "agentic"}


@dataclass(frozen=True, slots=True)
class _Learned:
    """A model, and how it came about."""

    model: "Model"
    source: str
    requests: int | None  # of its source, if that was read
    seconds: float
    lost: str | None = None  # gates that its shareable model does not keep


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
    shareable: Annotated[
        bool,
        typer.Option(
            "--shareable",
            help="Model without the trace's own lengths and times: tables, copula. Prints lost gates.",
        ),
    ] = False,
    as_json: JsonOption = False,
    *,
    reading: Reading,
) -> None:
    """Learn a trace and write a new one that behaves like it."""
    from mallee.synth.core.knobs import Knobs
    from mallee.synth.core.streams import check_seed

    out = plain_out(out)
    with wrong_input_ends():
        knobs = Knobs(
            prefix_len=prefix_len,
            prefix_root=prefix_root,
            prompt_len=prompt_len,
            osl=osl,
            speedup=speedup,
        ).validate()
        check_seed(seed)
        check_words(model, requests, format)
        check_files(source, out, save_model)
        if program is not None and save_model is not None:
            raise ConfigError(
                "--save-model: programs are not learned; give --program again instead"
            )
        learned = _learned(source, program, model, shareable=shareable, reading=reading)
        num = requests or learned.requests
        if num is None:
            raise ConfigError(f"{learned.source}: it has no number of requests; give --requests")
        workload = learned.model.generate(requests=num, seed=seed, knobs=knobs)
        chosen = format or _FORMATS.get(learned.model.kind, "agentic")
        check_loop(chosen, open_loop)
        if save_model is not None:
            _save(learned.model, save_model)
        if learned.lost is not None:
            sys.stderr.write(f"gates that the shareable model does not keep: {learned.lost}\n")
        begun = time.perf_counter()
        written = write(workload, out, num, chosen, reading.block_size, is_open=bool(open_loop))
        seconds = time.perf_counter() - begun
    summary = {
        "source": learned.source,
        "model": learned.model.kind,
        "seed": seed,
        "knobs": _changed(knobs),
        "format": chosen,
        "block_size": reading.block_size or workload.id_tokens,
        "out": str(out),
        **_plain(written),
        "learn_s": round(learned.seconds, 3),
        "write_s": round(seconds, 3),
        "requests_per_min": round(60 * num / seconds),
        "sha256": digest(out),
    }
    _show(summary, out, as_json=as_json)


def _learned(
    source: Path | None,
    program: str | None,
    kind: str | None,
    *,
    shareable: bool,
    reading: Reading,
) -> _Learned:
    """From one of a trace, a saved model, a program. Raises ConfigError, CodecError."""
    from mallee.synth.fit import fit
    from mallee.synth.programs.named import PROGRAMS
    from mallee.synth.saved import is_model, load_model
    from mallee.synth.session.shareable.model import to_shareable

    if (source is None) == (program is None):
        raise ConfigError("give --from a trace or a saved model, or else --program")
    begun = time.perf_counter()
    if source is None:
        if program not in PROGRAMS:
            raise ConfigError(f"--program={program}: give one of {', '.join(PROGRAMS)}")
        name = f"program {program}"
        if shareable:
            raise ConfigError(f"--shareable: {name} knows no trace; leave it out")
        check_unread(name, reading)
        check_kind(name, PROGRAMS[program].kind, kind)
        return _Learned(PROGRAMS[program], name, None, _since(begun))
    if is_model(source):
        check_unread(str(source), reading)
        model = load_model(source)
        check_kind(str(source), model.kind, kind)
        shared = to_shareable(model) if shareable else model
        lost = None if shared is model else _lost(shared, _like(model))
        return _Learned(shared, str(source), None, _since(begun), lost)
    with waiting(f"learning {source.name} ...") as shown:
        read = read_source(source, reading, shown)
        model = fit(read.trace, kind or "session")
        model = to_shareable(model) if shareable else model
        lost = _lost(model, read.trace) if shareable else None
    return _Learned(model, str(source), len(read.trace), _since(begun), lost)


def _like(model: "Model") -> "Trace":
    """A trace of a learned source's length, for a source that is not at hand."""
    from mallee.synth.session.model import SessionModel
    from mallee.traces.trace import trace_of

    assert isinstance(model, SessionModel)  # others are not shareable
    return trace_of(model.generate(requests=len(model.steps), seed=1))


def _lost(shared: "Model", trace: "Trace") -> str:
    """The gates that a shareable model misses against its source, for people."""
    from mallee.synth.compare.fits import lost_gates
    from mallee.synth.compare.report import shown

    missed = lost_gates(shared, trace)
    found = "; ".join(
        f"{each.gate.name} {shown(each.value)}, bar {each.gate.bar:g}" for each in missed
    )
    return found or "none"


def _since(begun: float) -> float:
    return time.perf_counter() - begun


def _save(model: "Model", path: Path) -> None:
    """Says what a reader of the file will know of the trace."""
    from mallee.synth.saved import privacy_note, save_model

    save_model(model, path)
    sys.stderr.write(f"wrote {path}: {privacy_note(model)}\n")


def _changed(knobs: "Knobs") -> dict[str, Any]:
    """Those that are not at their default."""
    return {
        field.name: value
        for field in fields(knobs)
        if (value := getattr(knobs, field.name)) != field.default
    }


def _plain(written: "Written") -> dict[str, Any]:
    import msgspec

    plain: dict[str, Any] = msgspec.to_builtins(written)
    return plain


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


def add_to(synth: typer.Typer) -> None:
    """Add `generate` to `synth`."""
    synth.command()(reads_traces(generate))
