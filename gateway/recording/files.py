"""The files of sessions' records in one folder, which several gateways and lives of them may share.

The name of a part is a digest of its tenant, one of its session's owner and name, so that no other scope's
request finds it, and a number. A part has one writer and is only ever appended to. Only the user that
serves may read it.
"""

import hashlib
import os
import re
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Final, Literal

from mallee.protocol.ids import Scope
from mallee.sessions.record import whole_nbytes

_SUFFIX: Final = ".session"
_PART: Final = re.compile(r"([0-9a-f]{16})-[0-9a-f]{32}-[0-9]+\.session")


class RecordFolder:
    """At most `most` parts, `most_each` of a tenant with a name. Methods do I/O, and raise OSError."""

    def __init__(self, folder: Path, *, most: int, most_each: int) -> None:
        self._folder = folder
        self._most = most
        self._most_each = most_each

    def make(self) -> None:
        """Make the folder, for the user alone; one that is there stays as it is."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def is_full_for(self, tenant: str) -> Literal["sessions", "tenant_sessions"] | None:
        """The limit that another part of `tenant` would break; None: there is room for it."""
        found = (_PART.fullmatch(entry.name) for entry in os.scandir(self._folder))
        owners = Counter(part[1] for part in found if part is not None)
        if owners.total() >= self._most:
            return "sessions"
        return "tenant_sessions" if tenant and owners[_tag(tenant)] >= self._most_each else None

    def new_part(self, scope: Scope, session: str, tenant: str) -> Path:
        """An empty part, after those that are there."""
        number = len(self.parts(scope, session))
        while True:
            name = f"{_tag(tenant)}-{_digest(scope, session)}-{number}{_SUFFIX}"
            path = self._folder / name
            with suppress(FileExistsError):
                os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
                return path
            number += 1

    def parts(self, scope: Scope, session: str) -> list[Path]:
        """The parts of a session, the oldest first."""
        found = self._folder.glob(f"*-{_digest(scope, session)}-*{_SUFFIX}")
        return sorted(found, key=lambda path: int(path.stem.rpartition("-")[2]))

    def read(self, scope: Scope, session: str) -> bytes:
        """The whole record of a session: its parts without what is torn. Empty: there is none."""
        raws = [path.read_bytes() for path in self.parts(scope, session)]
        return b"".join(raw[: whole_nbytes(raw)] for raw in raws)

    def delete(self, scope: Scope, session: str) -> int:
        """Delete a session's record; the number of its parts."""
        parts = self.parts(scope, session)
        for path in parts:
            path.unlink(missing_ok=True)
        return len(parts)


def append(path: str, raw: bytes) -> None:
    """Append to a part that is there. Raises OSError; then some of `raw` may be written."""
    with open(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW), "wb", buffering=0) as file:
        left = memoryview(raw)
        while left:
            left = left[file.write(left) :]


def _tag(tenant: str) -> str:
    name = tenant.encode(errors="surrogatepass")
    return hashlib.blake2b(name, person=b"mallee tenant", digest_size=8).hexdigest()


def _digest(scope: Scope, session: str) -> str:
    name = f"{len(scope)}:{scope}{session}".encode(errors="surrogatepass")
    return hashlib.blake2b(name, person=b"mallee session", digest_size=16).hexdigest()
