"""Logs after a run: each line is JSON, none has a secret, and one alone tells of each request."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

ANSWER: Final = re.compile(r"[A-Z]+ \S+ (\d+|unanswered) in [\d.]+ s, x-request-id (\S+)")
MAX_SHOWN: Final = 5


class Asked(NamedTuple):
    """A request as its client knows it: the gateway, the beginning, and the status, 0 if none came."""

    gateway: str
    at: float
    status: int = 0


class Told(NamedTuple):
    """Faults of logs, and the sizes of them."""

    faults: list[str]
    num_lines: int
    num_requests: int  # that are told of
    num_lost: int  # of those with a status, whose gateway was killed, or could not write


def read(
    files: Iterable[Path],
    asked: Mapping[str, Asked],
    secrets: Sequence[str],
    lost: Mapping[str, Sequence[tuple[float, float]]],
) -> Told:
    """Read `files`. `lost`: when a process, by its name, was killed or could not write."""
    faults, statuses, num_lines = list[str](), dict[str, list[str]](), 0
    for file in files:
        text = file.read_text(errors="replace")
        faults += [f"{file.name}: a secret is in it" for each in secrets if each in text]
        for line in text.splitlines():
            num_lines += 1
            try:
                found = ANSWER.fullmatch(json.loads(line)["message"])
            except (ValueError, KeyError, TypeError):
                faults.append(f"{file.name}: no JSON: {line[:300]!r}")
                continue
            if found is not None:
                statuses.setdefault(found[2], []).append(found[1])
    num_lost = 0
    for name, request in asked.items():
        told = statuses.get(name, [])
        if len(told) > 1:
            faults.append(f"{name} is told of {len(told)} times: {told}")
        elif told and request.status and told != [str(request.status)]:
            faults.append(f"{name} got {request.status}, and the log tells of {told}")
        elif request.status and not told:
            num_lost += 1
            if not any(begin <= request.at <= end for begin, end in lost[request.gateway]):
                faults.append(f"{name}, of {request}, is not told of")
    shown = [*faults[:MAX_SHOWN], f"{len(faults) - MAX_SHOWN} more"]
    return Told(shown if len(faults) > MAX_SHOWN else faults, num_lines, len(statuses), num_lost)
