"""Reads a trace file of any known kind as a `Workload`."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from mallee.protocol.errors import CodecError, ConfigError
from mallee.traces.files.lines import MAX_ID_TOKENS, TraceFile, Unroll
from mallee.traces.files.problems import Problems
from mallee.traces.formats import agentic, bailian, chats, dag, rows, sessions, tables, trees, weka
from mallee.traces.formats.dag_calls import ANSWER_TOKENS
from mallee.traces.workload import Request, Workload

T = TypeVar("T")

_FORMS: Final = ("mooncake", "agentic", "bailian", "sessions", "trees", "dag")
_UNROLLED: Final = {  # kinds that are read as another one, line by line
    **dict.fromkeys(("azure", "burstgpt", "vllm", "openai"), "rows"),
    "sharegpt": "dag",
    "weka": "sessions",
}
KINDS: Final = ("auto", *_FORMS, *_UNROLLED)
_PEEK_LINES: Final = 256
_KNOWN: Final = (
    "known are rows with timestamp, input_length, output_length, hash_ids (Mooncake, agentic, Bailian),"
    " sessions with requests (Claude Code, Weka), trees with nodes (tree of thoughts), sessions with turns"
    " (aiperf's dag-jsonl), conversations (ShareGPT), requests with messages (OpenAI), results of `vllm"
    " bench serve`, CSV of Azure and BurstGPT; of another table name the columns, as --kind"
    " timestamp_ms=ts,input=prompt_tokens,output=answer_tokens"
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
    sorts: bool = False,
) -> Workload:
    """The requests of `path`, at most `limit` of them; only the first lines are read now.

    `kind` "auto" goes by content; columns as of `tables.columns_of` are a table's. `spread_ticks`: rows
    whose timestamps were cut to 3 s ticks are spread over their tick, evenly with seed 0, else at random.
    `id_tokens`: what a hash id stands for, by default the largest size that fits the first rows. `seed`
    and `sessions_per_hour` say when recorded sessions and trees begin, and rows that have no time;
    `max_gap_s` cuts pauses inside sessions. Malformed lines are left out and counted in `problems` (each
    time the workload is read, from 0 again), without it they are errors. `sorts`: rows may come in any
    order of time. Raises ConfigError for a missing or empty file or a wrong option, CodecError for a file
    that is not understood.
    """
    _check_options(kind, limit, id_tokens, seed, sessions_per_hour, max_gap_s)
    lines = TraceFile(Path(path), problems, limit, sorts)
    file = _File(lines, list(islice(lines.numbered(), _PEEK_LINES)))
    file.require_requests()
    found = file.kind() if kind == "auto" else kind
    note = ""
    if found not in _FORMS and (found != "rows" or file.has_odd_rows()):
        size = id_tokens or dag.ID_TOKENS
        file, note = file.unrolled(lambda: _unroller(found, seed, sessions_per_hour, size))
        id_tokens = size if found == "openai" else id_tokens
        file.require_requests()
    form = _UNROLLED.get(found, found)
    match form:
        case "sessions":
            made = _sessions(file, seed, sessions_per_hour, max_gap_s)
        case "trees":
            made = _trees(file, seed, sessions_per_hour)
        case "dag":
            made = _dag(file, id_tokens or dag.ID_TOKENS, seed, sessions_per_hour)
        case "bailian":
            made = _bailian(file, id_tokens or bailian.ID_TOKENS)
        case _:
            spread_ticks &= not note
            made = _rows(file, form, spread_ticks=spread_ticks, id_tokens=id_tokens, seed=seed)
    kind = found if found in _UNROLLED else "table" if "=" in found else made.kind
    return replace(made, kind=kind, note="; ".join(filter(None, (note, made.note))))


@dataclass(frozen=True, slots=True)
class _File:
    """A file with its first lines, and how it is to be read."""

    lines: TraceFile
    head: list[tuple[int, bytes]]

    def require_requests(self) -> None:
        """Raises ConfigError if there is no line of them."""
        if not self.head:
            kept = [] if self.lines.problems is None else self.lines.problems.kept
            first = f"; {kept[0]}" if kept else ""
            raise ConfigError(f"trace {self.lines.path}: there are no requests in it{first}")

    def kind(self) -> str:
        """By the first line, or, with problems, the first of a known form; "rows" is mooncake or agentic."""
        return next(self._read(lambda number, line: _kind_of(self.lines, number, line)))[1]

    def first(self, decoder: "msgspec.json.Decoder[T]") -> list[tuple[int, T]]:
        """The first lines, decoded; with problems, those that can be. Raises CodecError if none can."""
        return list(self._read(lambda number, line: self.lines.decode(number, line, decoder)))

    def unrolled(
        self, make: "Callable[[], tuple[Unroll, tables.Clock | None]]"
    ) -> "tuple[_File, str]":
        """The same file by another form's lines, and how their times are read."""
        unroll, clock = make()
        head = list(islice(replace(self.lines, unroll=lambda: unroll).numbered(), _PEEK_LINES))
        lines = replace(self.lines, unroll=lambda: make()[0])
        return _File(lines, head), "" if clock is None else clock.note

    def has_odd_rows(self) -> bool:
        """Whether some of Mooncake's first rows are understood only as a table's, or none has a time."""
        unroll, _ = _unroller("mooncake", 0, 1.0, 1)
        timed = [False]
        for number, line in self.head:
            try:
                row = next(unroll(self.lines, number, line))
                rows.decoder.decode(msgspec.json.encode(row))
            except (CodecError, msgspec.MsgspecError):
                continue
            try:
                timed.append(rows.decoder.decode(line).timestamp != rows.UNTIMED)
            except msgspec.MsgspecError:
                return True
        return len(timed) > 1 and not any(timed)

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
        problems, limit = self.lines.problems, self.lines.limit

        def begin() -> Iterator[Request]:
            if problems is not None:
                problems.clear()
            return read() if limit is None else islice(read(), limit)

        return Workload(self.lines.path.name, id_tokens, begin, kind, note, has_forks)


def _unroller(
    kind: str, seed: int, per_hour: float, id_tokens: int
) -> tuple[Unroll, tables.Clock | None]:
    """The unroller of one reading, and the clock of its rows. Raises ConfigError for wrong columns."""
    if kind == "sharegpt":
        return chats.unroll_shared, None
    if kind == "weka":
        return weka.unroll_weka, None
    named = tables.KNOWN.get("mooncake" if kind == "rows" else kind)
    columns = named or tables.columns_of(kind)
    clock = tables.Clock(columns, seed, per_hour)
    table = tables.Table(columns, clock)
    if kind == "vllm":
        return partial(tables.unroll_bench, table), clock
    return (chats.Requests(table, id_tokens) if kind == "openai" else table), clock


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
        return trees.read_trees(
            file.lines, seed=seed, trees_per_hour=per_hour, limit=file.lines.limit
        )

    note = (
        f"trees begin by chance, {per_hour:g} an hour (seed {seed}), with"
        f" {trees.ROOT_TOKENS} tokens of shared instructions"
    )
    return file.workload("trees", trees.ID_TOKENS, read, note, has_forks=True)


def _dag(file: _File, size: int, seed: int, per_hour: float) -> Workload:
    def read() -> Iterator[Request]:
        return dag.read_dag(
            file.lines, size, seed=seed, sessions_per_hour=per_hour, limit=file.lines.limit
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
    is_plain = kind != "agentic" and all(row.is_plain for _, row in first)
    kind = ("mooncake" if is_plain else "agentic") if kind == "rows" else kind
    size = id_tokens or _guess_size(file, first)
    has_forks = not is_plain and _names(file, b'"fork_of"')
    large = [rows.LARGE_WITH_FORKS] if has_forks else []
    whole = [row.hash_ids for _, row in first if row.fork_of is None]  # ids of forks are not read
    hashes = any(rows.are_hashes(ids, *large) for ids in whole)
    spread = is_plain and spread_ticks and rows.has_ticks([row for _, row in first])

    def read() -> Iterator[Request]:
        if not is_plain:
            return iter(agentic.read_agentic(file.lines, size, has_hashes=hashes))
        return rows.read_plain(file.lines, size, spread_ticks=spread, seed=seed, has_hashes=hashes)

    note = ""
    if not is_plain:
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
    """Whether any line has `field`, of as many as are wanted."""
    lines = replace(file.lines, problems=Problems(0)).numbered()
    return any(field in line for _, line in islice(lines, file.lines.limit))


def _kind_of(file: TraceFile, number: int, line: bytes) -> str:
    if found := tables.kind_of_header(line):
        return found
    try:
        entry = _any_object.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        what = f"neither a JSON object nor a known CSV header; {_KNOWN}"
        raise file.bad(number, what, "") from error
    keys = entry.keys()
    if "nodes" in keys:
        return "trees"
    if "requests" in keys and "block_size" in keys:
        return "weka" if "hash_id_scope" in keys else "sessions"
    if keys & {"input_lens", "request_throughput"}:
        return "vllm"
    if "conversations" in keys:
        return "sharegpt"
    if "session_id" in keys and keys & {"turns", "orchestrator"}:
        return "dag"
    if "chat_id" in keys:
        return "bailian"
    if keys & {"messages", "prompt", "body", "request", "response", "usage"}:
        return "openai"
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
    if kind not in KINDS and "=" not in kind:
        raise ConfigError(f"kind={kind!r}: give one of {', '.join(KINDS)}, or columns")
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
