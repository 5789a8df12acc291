"""Reads a trace file of any known kind as a `Workload`."""

from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, get_args

import msgspec

from mallee.protocol.errors import ConfigError
from mallee.traces import azure, rows, sessions, trees
from mallee.traces.lines import bad_line, decode_line, numbered_lines
from mallee.traces.workload import Request, Workload

Kind: TypeAlias = Literal["auto", "mooncake", "agentic", "sessions", "trees", "azure"]

_PEEK_LINES: Final = 256
_KNOWN: Final = (
    "known are rows with timestamp, input_length, output_length, hash_ids (Mooncake, agentic),"
    " sessions with requests (Claude Code), trees with nodes (tree of thoughts), Azure's CSV"
)
_TURNS: Final = "each turn waits for its session's turn before; how long tools ran is not known"
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
) -> Workload:
    """The requests of `path`, at most `limit` of them; only the first lines are read now.

    `kind` "auto" tells by content. `spread_ticks`: rows whose timestamps were cut to 3 s ticks are
    spread over their tick, evenly with seed 0, else at random. `id_tokens`: what a hash id stands for,
    by default the largest size that fits the first rows. `seed` and `sessions_per_hour` say when
    recorded sessions and trees begin, `max_gap_s` cuts pauses inside sessions. Raises ConfigError for
    a missing or empty file or a wrong option, CodecError for a file or line that is not understood.
    """
    _check_options(kind, limit, id_tokens, sessions_per_hour, max_gap_s)
    path = Path(path)
    head = list(islice(numbered_lines(path), _PEEK_LINES))
    if not head:
        raise ConfigError(f"trace {path}: there are no requests in it")
    found = _kind_of(path, head[0][1]) if kind == "auto" else kind
    if found == "azure":
        azure.check_header(path, head[0][1])
        return _workload(path, "azure", 512, lambda: azure.read_azure(path), limit)
    if found == "sessions":
        return _sessions(path, head[0], limit, seed, sessions_per_hour, max_gap_s)
    if found == "trees":
        return _trees(path, limit, seed, sessions_per_hour)
    return _rows(
        path, found, head, limit, spread_ticks=spread_ticks, id_tokens=id_tokens, seed=seed
    )


def _sessions(
    path: Path,
    first: tuple[int, bytes],
    limit: int | None,
    seed: int,
    sessions_per_hour: float,
    max_gap_s: float,
) -> Workload:
    block_size = decode_line(path, *first, sessions.decoder).block_size

    def read() -> Iterator[Request]:
        return sessions.read_sessions(
            path, seed=seed, sessions_per_hour=sessions_per_hour, max_gap_s=max_gap_s
        )

    note = (
        f"sessions begin by chance, {sessions_per_hour:g} an hour (seed {seed}), pauses cut to"
        f" {max_gap_s:g} s; equal tool and system sizes share text"
    )
    return _workload(path, "sessions", block_size, read, limit, note)


def _trees(path: Path, limit: int | None, seed: int, trees_per_hour: float) -> Workload:
    def read() -> Iterator[Request]:
        return trees.read_trees(path, seed=seed, trees_per_hour=trees_per_hour, limit=limit)

    note = (
        f"trees begin by chance, {trees_per_hour:g} an hour (seed {seed}), with"
        f" {trees.ROOT_TOKENS} tokens of shared instructions"
    )
    return _workload(path, "trees", trees.ID_TOKENS, read, limit, note, has_forks=True)


def _rows(
    path: Path,
    kind: str,
    head: list[tuple[int, bytes]],
    limit: int | None,
    *,
    spread_ticks: bool,
    id_tokens: int | None,
    seed: int,
) -> Workload:
    first = [decode_line(path, number, line, rows.decoder) for number, line in head]
    if kind == "rows":
        kind = "mooncake" if all(row.is_plain for row in first) else "agentic"
    if id_tokens is None:
        id_tokens = rows.guess_id_tokens(first) or 0
        if not id_tokens:
            what = f"more hash_ids than input_length has blocks of {rows.ID_TOKENS[-1]} tokens"
            number = next(n for (n, _), row in zip(head, first, strict=True) if rows.is_over(row))
            raise bad_line(path, number, f"{what}; if ids stand for fewer, give --id-tokens")
    size = id_tokens
    if kind == "agentic":
        note = "" if any(row.request_id is not None or row.wait_for for row in first) else _TURNS
        return _workload(path, kind, size, lambda: iter(rows.read_agentic(path, size)), limit, note)
    spread = spread_ticks and rows.has_ticks(first)
    how = f"by chance (seed {seed})" if seed else "evenly"
    return _workload(
        path,
        kind,
        size,
        lambda: rows.read_plain(path, size, spread_ticks=spread, seed=seed),
        limit,
        note=f"arrivals spread over their 3 s ticks, {how}" if spread else "",
    )


def _workload(
    path: Path,
    kind: str,
    id_tokens: int,
    read: Callable[[], Iterator[Request]],
    limit: int | None,
    note: str = "",
    has_forks: bool = False,
) -> Workload:
    return Workload(
        name=path.name,
        id_tokens=id_tokens,
        read=read if limit is None else lambda: islice(read(), limit),
        kind=kind,
        note=note,
        has_forks=has_forks,
    )


def _kind_of(path: Path, line: bytes) -> str:
    """By the first line; "rows" is mooncake or agentic."""
    if azure.is_header(line):
        return "azure"
    try:
        keys = _any_object.decode(line).keys()
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise bad_line(
            path, 1, f"neither a JSON object nor a known CSV header; {_KNOWN}"
        ) from error
    if "nodes" in keys:
        return "trees"
    if "requests" in keys and "block_size" in keys:
        return "sessions"
    if keys & {"timestamp", "input_length", "output_length", "hash_ids"}:
        return "rows"
    raise bad_line(path, 1, f"fields {', '.join(sorted(keys)) or 'none'}; {_KNOWN}")


def _check_options(
    kind: str,
    limit: int | None,
    id_tokens: int | None,
    sessions_per_hour: float,
    max_gap_s: float,
) -> None:
    if kind not in get_args(Kind):
        raise ConfigError(f"kind={kind!r}: give one of {', '.join(get_args(Kind))}")
    if limit is not None and limit < 1:
        raise ConfigError(f"limit={limit}: give at least one request")
    if id_tokens is not None and id_tokens < 1:
        raise ConfigError(f"id_tokens={id_tokens}: give at least 1")
    if not 0.0 < sessions_per_hour < float("inf"):
        raise ConfigError(f"sessions_per_hour={sessions_per_hour}: give a rate above 0")
    if not 0.0 <= max_gap_s < float("inf"):
        raise ConfigError(f"max_gap_s={max_gap_s}: give 0 or more seconds")
