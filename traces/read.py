"""Reads a trace file of any known kind as a `Workload`."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, TypeVar, get_args

import msgspec

from mallee.protocol.errors import CodecError, ConfigError
from mallee.traces.files.lines import MAX_ID_TOKENS, TraceFile
from mallee.traces.files.problems import Problems
from mallee.traces.formats import agentic, azure, bailian, dag, rows, sessions, trees
from mallee.traces.formats.dag_calls import ANSWER_TOKENS
from mallee.traces.workload import Request, Workload

Kind: TypeAlias = Literal[
    "auto", "mooncake", "agentic", "bailian", "sessions", "trees", "dag", "azure"
]
T = TypeVar("T")

_PEEK_LINES: Final = 256
_KNOWN: Final = (
    "known are rows with timestamp, input_length, output_length, hash_ids (Mooncake, agentic, Bailian),"
    " sessions with requests (Claude Code), trees with nodes (tree of thoughts), sessions with turns"
    " (aiperf's dag-jsonl), Azure's CSV"
)
_TURNS: Final = "each turn waits for its session's turn before; how long tools ran is not known"
_CHATS: Final = "each chat waits for its parent; how long people took is not known"
_any_object: Final = msgspec.json.Decoder(dict[str, Any])


def read_workload(
    path: Path | str,
    *,
    kind: str = "auto",
    limit: int | None = None,
    spread_ticks: bool = True,
    id_tokens: int | None = None,
    seed: int = 0,
    sessions_per_hour: float = 240.0,
    max_gap_s: float = 600.0,
    problems: Problems | None = None,
) -> Workload:
    """The requests of `path`, at most `limit` of them; only the first lines are read now.

    `kind` "auto" goes by content. `spread_ticks`: rows whose timestamps were cut to 3 s ticks are
    spread over their tick, evenly with seed 0, else at random. `id_tokens`: what a hash id stands for,
    by default the largest size that fits the first rows. `seed` and `sessions_per_hour` say when
    recorded sessions and trees begin, `max_gap_s` cuts pauses inside sessions. Malformed lines are left
    out and counted in `problems` (each time the workload is read, from 0 again), without it they are
    errors. Raises ConfigError for a missing or empty file or a wrong option, CodecError for a file
    that is not understood.
    """
    _check_options(kind, limit, id_tokens, seed, sessions_per_hour, max_gap_s)
    lines = TraceFile(Path(path), problems)
    file = _File(lines, list(islice(lines.numbered(), _PEEK_LINES)), limit)
    if not file.head:
        first = f"; {problems.kept[0]}" if problems is not None and problems.kept else ""
        raise ConfigError(f"trace {path}: there are no requests in it{first}")
    found = file.kind() if kind == "auto" else kind
    match found:
        case "azure":
            azure.check_header(lines, file.head[0][1])
            return file.workload("azure", 512, lambda: azure.read_azure(lines))
        case "sessions":
            return _sessions(file, seed, sessions_per_hour, max_gap_s)
        case "trees":
            return _trees(file, seed, sessions_per_hour)
        case "dag":
            return _dag(file, id_tokens or dag.ID_TOKENS, seed, sessions_per_hour)
        case "bailian":
            return _bailian(file, id_tokens or bailian.ID_TOKENS)
        case _:
            return _rows(file, found, spread_ticks=spread_ticks, id_tokens=id_tokens, seed=seed)


@dataclass(frozen=True, slots=True)
class _File:
    """A file with its first lines, and how it is to be read."""

    lines: TraceFile
    head: list[tuple[int, bytes]]
    limit: int | None

    def kind(self) -> str:
        """By the first line, or, with problems, the first of a known form; "rows" is mooncake or agentic."""
        return next(self._read(lambda number, line: _kind_of(self.lines, number, line)))[1]

    def first(self, decoder: "msgspec.json.Decoder[T]") -> list[tuple[int, T]]:
        """The first lines, decoded; with problems, those that can be. Raises CodecError if none can."""
        return list(self._read(lambda number, line: self.lines.decode(number, line, decoder)))

    def _read(self, read: Callable[[int, bytes], T]) -> Iterator[tuple[int, T]]:
        """With problems, the lines that can be read. Raises CodecError if none can, else at the first."""
        first: CodecError | None = None
        has_any = False
        for number, line in self.head:
            try:
                value = read(number, line)
            except CodecError as error:
                if self.lines.problems is None:
                    raise
                first = first or error
                continue
            has_any = True
            yield number, value
        if not has_any and first is not None:
            raise first

    def workload(
        self,
        kind: str,
        id_tokens: int,
        read: Callable[[], Iterator[Request]],
        note: str = "",
        has_forks: bool = False,
    ) -> Workload:
        problems, limit = self.lines.problems, self.limit

        def begin() -> Iterator[Request]:
            if problems is not None:
                problems.clear()
            return read() if limit is None else islice(read(), limit)

        return Workload(self.lines.path.name, id_tokens, begin, kind, note, has_forks)


def _sessions(file: _File, seed: int, per_hour: float, max_gap_s: float) -> Workload:
    size = file.first(sessions.decoder)[0][1].block_size

    def read() -> Iterator[Request]:
        return sessions.read_sessions(
            file.lines, size, seed=seed, sessions_per_hour=per_hour, max_gap_s=max_gap_s
        )

    note = (
        f"sessions begin by chance, {per_hour:g} an hour (seed {seed}), pauses cut to"
        f" {max_gap_s:g} s; equal tool and system sizes share text"
    )
    return file.workload("sessions", size, read, note)


def _bailian(file: _File, size: int) -> Workload:
    hashes = any(rows.are_hashes(chat.hash_ids) for _, chat in file.first(bailian.decoder))

    def read() -> Iterator[Request]:
        return bailian.read_bailian(file.lines, size, has_hashes=hashes)

    return file.workload("bailian", size, read, _CHATS)


def _trees(file: _File, seed: int, per_hour: float) -> Workload:
    def read() -> Iterator[Request]:
        return trees.read_trees(file.lines, seed=seed, trees_per_hour=per_hour, limit=file.limit)

    note = (
        f"trees begin by chance, {per_hour:g} an hour (seed {seed}), with"
        f" {trees.ROOT_TOKENS} tokens of shared instructions"
    )
    return file.workload("trees", trees.ID_TOKENS, read, note, has_forks=True)


def _dag(file: _File, size: int, seed: int, per_hour: float) -> Workload:
    def read() -> Iterator[Request]:
        return dag.read_dag(
            file.lines, size, seed=seed, sessions_per_hour=per_hour, limit=file.limit
        )

    note = (
        f"sessions begin by chance, {per_hour:g} an hour (seed {seed}); a token is a word or a mark,"
        f" and answers without max_tokens have {ANSWER_TOKENS}"
    )
    return file.workload("dag", size, read, note, has_forks=_names(file, b'"forks"'))


def _rows(
    file: _File, kind: str, *, spread_ticks: bool, id_tokens: int | None, seed: int
) -> Workload:
    first = file.first(rows.decoder)
    if kind == "rows":
        kind = "mooncake" if all(row.is_plain for _, row in first) else "agentic"
    size = id_tokens or _guess_size(file, first)
    has_forks = kind == "agentic" and _names(file, b'"fork_of"')
    large = [rows.LARGE_WITH_FORKS] if has_forks else []
    whole = [row.hash_ids for _, row in first if row.fork_of is None]  # ids of forks are not read
    hashes = any(rows.are_hashes(ids, *large) for ids in whole)
    spread = kind != "agentic" and spread_ticks and rows.has_ticks([row for _, row in first])

    def read() -> Iterator[Request]:
        if kind == "agentic":
            return iter(agentic.read_agentic(file.lines, size, limit=file.limit, has_hashes=hashes))
        return rows.read_plain(file.lines, size, spread_ticks=spread, seed=seed, has_hashes=hashes)

    note = ""
    if kind == "agentic":
        is_named = any(row.request_id is not None or row.wait_for for _, row in first)
        note = "" if is_named else _TURNS
    elif spread:
        how = f"by chance (seed {seed})" if seed else "evenly"
        note = f"arrivals spread over their 3 s ticks, {how}"
    return file.workload(kind, size, read, note, has_forks)


def _guess_size(file: _File, first: list[tuple[int, rows.Row]]) -> int:
    if file.lines.problems is not None:  # rows at which no size fits will be counted and left out
        first = [(number, row) for number, row in first if not rows.is_over(row)] or first
    every = [row for _, row in first]
    size, usual = rows.guess_id_tokens(every), rows.usual_id_tokens(every)
    if usual is not None and (size is None or size < usual):
        if file.lines.problems is not None:
            return usual
        number, row = next(each for each in first if rows.is_over(each[1], usual))
        what = f"{len(row.hash_ids)} hash_ids for an input_length of {row.input_length}"
        what = f"{what}: in most rows an id stands for {usual} tokens, so at most"
        what = f"{what} {-(-row.input_length // usual)}; mend the row, or give --id-tokens"
        raise file.lines.bad(number, what, "hash_ids")
    if size is None:
        what = f"more hash_ids than input_length has blocks of {rows.ID_TOKENS[-1]} tokens"
        number = next(number for number, row in first if rows.is_over(row))
        what = f"{what}; if ids stand for fewer, give --id-tokens"
        raise file.lines.bad(number, what, "hash_ids")
    return size


def _names(file: _File, field: bytes) -> bool:
    """Whether any line has `field`."""
    return any(field in line for _, line in TraceFile(file.lines.path, Problems(0)).numbered())


def _kind_of(file: TraceFile, number: int, line: bytes) -> str:
    if azure.is_header(line):
        return "azure"
    try:
        keys = _any_object.decode(line).keys()
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        what = f"neither a JSON object nor a known CSV header; {_KNOWN}"
        raise file.bad(number, what, "") from error
    if "nodes" in keys:
        return "trees"
    if "requests" in keys and "block_size" in keys:
        return "sessions"
    if "session_id" in keys and keys & {"turns", "orchestrator"}:
        return "dag"
    if "chat_id" in keys:
        return "bailian"
    if keys & {"timestamp", "input_length", "output_length", "hash_ids"}:
        return "rows"
    what = f"fields {', '.join(sorted(keys)) or 'none'}; {_KNOWN}"
    raise file.bad(number, what, "")


def _check_options(
    kind: str,
    limit: int | None,
    id_tokens: int | None,
    seed: int,
    per_hour: float,
    max_gap_s: float,
) -> None:
    if kind not in get_args(Kind):
        raise ConfigError(f"kind={kind!r}: give one of {', '.join(get_args(Kind))}")
    if limit is not None and limit < 1:
        raise ConfigError(f"limit={limit}: give at least one request")
    if id_tokens is not None and not 1 <= id_tokens <= MAX_ID_TOKENS:
        raise ConfigError(f"id_tokens={id_tokens}: give 1 to {MAX_ID_TOKENS}")
    if seed < 0:
        raise ConfigError(f"seed={seed}: give 0 or more")
    if not 0.0 < per_hour < float("inf"):
        raise ConfigError(f"sessions_per_hour={per_hour}: give a rate above 0")
    if not 0.0 <= max_gap_s < float("inf"):
        raise ConfigError(f"max_gap_s={max_gap_s}: give 0 or more seconds")
