"""`mallee replay-session` and `mallee export-episode`: recorded sessions, asked again or as arrays."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.console import Console
from rich.markup import escape

from mallee.cli.options import JsonOption, check_file, require_serve_extra
from mallee.cli.output import grid, print_error, print_json, say_written
from mallee.protocol.errors import ConfigError
from mallee.sessions.session import RecordedSession

if TYPE_CHECKING:
    from mallee.protocol.model import ModelSpec, WeightVersion
    from mallee.runtime.config import AppConfig
    from mallee.sessions.replay import MakeEngine, Outcome
    from mallee.worker.engine import Engine
    from mallee.worker.model.runner import TorchForward

MAX_ROWS: Final = 40  # of requests that are shown though they are as recorded
_MOCK_KV_TOKENS: Final = 1 << 26

FilesArgument = Annotated[
    list[Path],
    typer.Argument(help="A session's record, or an episode; parts of one session together."),
]


def replay_session(
    files: FilesArgument,
    model: Annotated[
        str | None,
        typer.Option(help="As --model of `mallee serve`; by default the recorded model's name."),
    ] = None,
    force: Annotated[
        bool, typer.Option(help="Replay on a model whose fields differ from the recorded one's.")
    ] = False,
    kv_gib: Annotated[float, typer.Option(min=0.01, help="KV memory for the replay.")] = 4.0,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.")] = None,
    weights: Annotated[
        list[str] | None,
        typer.Option(help="LABEL=FOLDER: a version of the weights that was served meanwhile."),
    ] = None,
    npz: Annotated[Path | None, typer.Option(help="Also write the session as an episode.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Ask a recorded session's requests again, in this process, and compare every token.

    Exit status 1 if a token differs, or a request could not be replayed.

    Example: mallee replay-session bug-7.rec --model smollm2
    """
    require_serve_extra()
    from mallee.sessions.replay import Replay

    raw = read_files(files)
    if npz is not None:
        write_episode(raw, npz)
    session = opened(raw)
    make_engine = engines_for(
        session,
        model,
        force=force,
        kv_gib=kv_gib,
        threads=threads,
        folders=folders_of(weights or []),
    )
    console = Console(stderr=as_json, highlight=False)
    outcomes: list[Outcome] = []
    with console.status("replaying ..."):
        outcomes.extend(Replay(session, make_engine).run())
    show(console, session, outcomes)
    if as_json:
        print_json(summary(session, outcomes))
    if any(each.verdict != "equal" for each in outcomes):
        raise typer.Exit(1)


def export_episode(
    files: FilesArgument,
    out: Annotated[Path, typer.Option(help="The .npz file.")],
    as_json: JsonOption = False,
) -> None:
    """Write a recorded session as arrays, for readers of .npz files. It replays as its record does.

    Example: mallee export-episode bug-7.rec --out bug-7.npz
    """
    raw = read_files(files)
    write_episode(raw, out)
    if as_json:
        session = opened(raw)
        told = {"session": session.parts[0].session, "tokens": session.num_tokens}
        print_json({"file": str(out), "bytes": out.stat().st_size, **told})


# Files


def read_files(files: list[Path]) -> bytes:
    """The records in `files`, one after the other, without what is torn. Raises ConfigError, CodecError."""
    from mallee.sessions.episode import record_of
    from mallee.sessions.record import read

    raws: list[bytes] = []
    for file in files:
        try:
            raw = record_of(file.read_bytes())
        except OSError as error:
            raise ConfigError(f"{file}: can't be read ({error.strerror})") from error
        contents = read(raw)
        if contents.num_ignored:
            print_error(
                f"{file}: the last {contents.num_ignored} bytes are torn or damaged, and left out"
            )
        raws.append(raw[: contents.nbytes])
    return b"".join(raws)


def opened(raw: bytes) -> RecordedSession:
    from mallee.sessions.record import read

    return RecordedSession(read(raw).entries)


def write_episode(raw: bytes, file: Path) -> None:
    from mallee.sessions.episode import episode_of

    check_file(file)
    file.write_bytes(episode_of(raw))
    say_written([file])


def folders_of(weights: list[str]) -> dict[str, str]:
    """Folders by label. Raises ConfigError."""
    pairs = [given.partition("=") for given in weights]
    for given, (label, _, folder) in zip(weights, pairs, strict=True):
        if not label or not folder:
            raise ConfigError(f"--weights {given}: give LABEL=FOLDER")
    return {label: folder for label, _, folder in pairs}


# Engines


def engines_for(
    session: RecordedSession,
    model: str | None,
    *,
    force: bool,
    kv_gib: float,
    threads: int | None,
    folders: dict[str, str],
) -> "MakeEngine":
    """Makes the engines of a replay: of the recorded model, computed as it was.

    `folders`: those of versions of its weights, by label. A record has their digests, and not where they lie.
    Raises ModelError, and unless `force` IncompatibleCapsule naming the fields in which the model differs.
    """
    from mallee.actors.build import resolve
    from mallee.actors.mock.fleet import MockPlan
    from mallee.protocol.ids import Incarnation, WorkerId
    from mallee.runtime.config import AppConfig
    from mallee.sessions.replay import check_model

    recorded, name = session.model, model or session.model.name
    kept = {"max_kept_share": 1.0}
    mock = {"kind": "mock", "kv_tokens": _MOCK_KV_TOKENS, **kept}
    asked = {"model": name, "engine": mock, "mock": {"speedup": 0}}
    mocked = MockPlan.of(AppConfig.model_validate(asked))  # which needs no weights
    if mocked.spec.fingerprint == recorded.fingerprint:
        engine = mocked.engine(WorkerId("replay"), Incarnation(0)).engine
        return lambda weights: engine
    specs = list(_specs(name, resolve(name)))
    same = (each for each in specs if each[0].fingerprint == recorded.fingerprint)
    closest, dtypes = next(same, specs[0])
    if not force:
        check_model(recorded, closest)
    computed = {**kept, **dtypes, "kv_gib": kv_gib, "threads": threads}
    return _Computed(AppConfig.model_validate({"model": name, "engine": computed}), folders).engine


def _specs(name: str, folder: Path) -> Iterator[tuple["ModelSpec", dict[str, str]]]:
    """The model in `folder`, in every way in which its weights can be computed, and the settings of each."""
    from mallee.worker.model.config import model_spec
    from mallee.worker.model.loading.checkpoint import weights_digest
    from mallee.worker.model.loading.config_json import read_config
    from mallee.worker.model.runner import resolve_dtype

    config = read_config(folder)
    digest = weights_digest(folder)
    first = resolve_dtype("auto", config, "cpu")
    for dtype in sorted(("float32", "bfloat16"), key=lambda each: each != first):
        for kv_dtype in ("auto", "fp8"):
            ways = {"dtype": dtype, "kv_dtype": kv_dtype}
            with suppress(ConfigError):  # its heads don't fit that
                spec = model_spec(
                    config, name=name, weights_digest=digest, max_model_len=None, **ways
                )
                yield spec, ways


class _Computed:
    """Engines that compute, one for each of a session's versions of weights."""

    def __init__(self, config: "AppConfig", folders: dict[str, str]) -> None:
        self._config = config
        self._folders = folders
        self._engines: dict[str, Engine] = {}

    def engine(self, weights: "WeightVersion") -> "Engine":
        """Raises MalleeError if these weights can't be loaded."""
        from mallee.actors.build import make_engine
        from mallee.protocol.ids import Incarnation, WorkerId

        digest = weights.digest  # a label alone changes no token
        if digest not in self._engines:
            name = WorkerId("replay")
            forward = self._load(weights)
            self._engines[digest] = make_engine(self._config, forward, name, Incarnation(0))
        return self._engines[digest]

    def _load(self, weights: "WeightVersion") -> "TorchForward":
        from mallee.actors.build import load_forward, resolve, threads_of
        from mallee.worker.model.loading.checkpoint import weights_digest

        folder, own = self._folders.get(weights.label), resolve(self._config.model)
        is_own = weights.digest in ("", weights_digest(own))  # that version brought no other ones
        if not is_own and folder is None:
            raise ConfigError(
                f"they were loaded from a folder that the record doesn't tell; give --weights"
                f" {weights.label}=FOLDER (the digest is {weights.digest})"
            )
        forward = load_forward(self._config, threads_of(self._config, 1))
        if folder is None:
            return forward
        forward.update(forward.prepare_update(resolve(folder), weights))
        return forward


# Results


def summary(session: RecordedSession, outcomes: "list[Outcome]") -> dict[str, Any]:
    """All that is shown, JSON-able."""
    first = next((d for each in outcomes for d in each.divergences), None)
    verdicts = [each.verdict for each in outcomes]
    return {
        "session": session.parts[0].session,
        "model": session.model.name,
        "fingerprint": session.model.fingerprint,
        "requests": len(outcomes),
        "tokens": session.num_tokens,
        "tokens_equal": sum(each.num_tokens for each in outcomes),
        "equal": verdicts.count("equal"),
        "diverged": verdicts.count("diverged"),
        "left_out": verdicts.count("left out"),
        "first_divergence": None if first is None else first._asdict(),
        "record_stopped": session.stopped,
    }


def show(console: Console, session: RecordedSession, outcomes: "list[Outcome]") -> None:
    shown = [each for i, each in enumerate(outcomes) if i < MAX_ROWS or each.verdict != "equal"]
    head = ("request", "asked", "branches", "tokens", "workers", "replay")
    console.print(grid(head, map(_row, shown), right=("branches", "tokens")))
    if len(shown) < len(outcomes):
        console.print(f"... and {len(outcomes) - len(shown)} more that are equal")
    for reason in session.stopped:
        console.print(f"the record ends before its session: {reason}")
    for each in outcomes:
        if each.verdict == "left out":
            console.print(f"[red]left out:[/] {escape(f'{each.request.name}: {each.reason}')}")
    found = [divergence for each in outcomes for divergence in each.divergences]
    if found:
        console.print(f"[red]first divergence:[/] {escape(str(found[0]))}")
    told = summary(session, outcomes)
    console.print(
        f"{told['tokens_equal']} of {told['tokens']} tokens are as recorded,"
        f" {told['equal']} of {told['requests']} requests"
    )


def _row(outcome: "Outcome") -> tuple[str, ...]:
    request, verdict = outcome.request, outcome.verdict
    workers = dict.fromkeys(name for branch in request.branches for name in branch.workers)
    return (
        escape(request.name),
        type(request.command).__name__.lower(),
        str(len(request.branches)),
        str(sum(len(branch.tokens) for branch in request.branches)),
        escape(", ".join(workers)),
        verdict if verdict == "equal" else f"[red]{verdict}[/]",
    )
