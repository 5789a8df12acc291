"""Malformed lines of a file that is read all the same: counted, the first ones kept."""

import re
from typing import Final, NamedTuple

from mallee.protocol.errors import CodecError, ConfigError

_MISSING: Final = re.compile(r"required field `([^`]*)`")
_PLACE: Final = re.compile(r"at `\$\.?([^`]*)`$")


class Problem(NamedTuple):
    """One malformed line."""

    line: int  # from 1
    field: str  # "" if it is the line as a whole
    message: str  # with file and line
    is_skipped: bool  # whether the line was left out; else it was read without what is wrong

    def __str__(self) -> str:
        return self.message


class Problems:
    """Malformed lines of one reading of a file. A new reading begins anew."""

    def __init__(self, keep: int = 20) -> None:
        """The first `keep` problems are kept, all are counted. Raises ConfigError if it is below 0."""
        if keep < 0:
            raise ConfigError(f"keep={keep}: give 0 or more problems to keep")
        self._keep = keep
        self.clear()

    def clear(self) -> None:
        """As if nothing had been read."""
        self.kept: list[Problem] = []
        self.num_skipped = 0  # lines that were left out
        self.num_mended = 0  # lines that were read without a malformed field

    def add(self, error: CodecError, *, is_skipped: bool = True) -> None:
        """Count an error made by `TraceFile.bad`."""
        if is_skipped:
            self.num_skipped += 1
        else:
            self.num_mended += 1
        if len(self.kept) < self._keep:
            line = int(error.fields.get("line", 0))
            self.kept.append(Problem(line, field_of(error), error.message, is_skipped))

    def __len__(self) -> int:
        return self.num_skipped + self.num_mended

    def __bool__(self) -> bool:
        return len(self) > 0

    def summary(self) -> str:
        """One line for people, "" if nothing was wrong."""
        parts = []
        if self.num_skipped:
            parts.append(f"{self.num_skipped} malformed line{_s(self.num_skipped)} left out")
        if self.num_mended:
            parts.append(f"{self.num_mended} slip{_s(self.num_mended)} mended")
        return ", ".join(parts)


def field_of(error: CodecError) -> str:
    """The field that `error` is about, as `hash_ids[1]`; "" if none."""
    if "field" in error.fields:
        return str(error.fields["field"])
    found = [pattern.search(error.message) for pattern in (_PLACE, _MISSING)]
    return ".".join(match[1] for match in found if match)


def _s(count: int) -> str:
    return "" if count == 1 else "s"
