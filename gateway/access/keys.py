"""API keys, of a file or the environment. Only their digests are kept.

Keys are long and random (`mallee keys new`), so that a plain SHA-256 can't be turned round; they are looked
up by a digest that is keyed anew in each process, so that no timing tells how much of a guess was right.
"""

import hashlib
import hmac
import json
import logging
import os
import secrets
import tempfile
import textwrap
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, Self, TypeAlias

import yaml
from pydantic import Field, ValidationError, model_validator

from mallee.protocol.errors import ConfigError
from mallee.runtime.config import Positive, Settings

log = logging.getLogger(__name__)

ENVIRONMENT: Final = "MALLEE_API_KEY"
MIN_CHARS: Final = 16

_LOADER: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
Role: TypeAlias = Literal["client", "proxy", "operator"]


class Key(Settings):
    """One key. Its limits hold for all gateways together."""

    name: str = Field(pattern=r"^[A-Za-z0-9_.@-]{1,64}$")
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$", repr=False)
    tenant: str | None = Field(default=None, max_length=128)
    role: Role = "client"
    expires: datetime | None = None
    weight: Positive = 1.0
    requests_per_minute: int | None = Field(default=None, ge=1)
    tokens_per_minute: int | None = Field(default=None, ge=1)
    max_running: int | None = Field(default=None, ge=1)
    max_branches: int | None = Field(default=None, ge=1)
    max_capsules: int | None = Field(default=None, ge=0)
    max_capsule_tokens: int | None = Field(default=None, ge=0)

    @property
    def owner(self) -> str:
        """The tenant of its requests: its own name, if it has none."""
        return self.name if self.tenant is None else self.tenant

    @property
    def may_name_tenants(self) -> bool:
        return self.role != "client"

    @property
    def is_operator(self) -> bool:
        return self.role == "operator"

    def is_valid(self, now: float) -> bool:
        """Whether it has not expired at `now`, in seconds since the epoch."""
        return self.expires is None or now < self.expires.timestamp()

    @model_validator(mode="after")
    def _check_time_zone(self) -> Self:
        if self.expires is not None and self.expires.tzinfo is None:
            raise ValueError("expires needs a time zone, as 2027-01-01T00:00:00Z has")
        return self


class KeyFile(Settings):
    """The content of a file of keys."""

    keys: list[Key]

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        for what in ("name", "sha256"):
            seen: set[str] = set()
            for key in self.keys:
                if (value := getattr(key, what)) in seen:
                    raise ValueError(f"key {key.name}: another one has the same {what}")
                seen.add(value)
        return self


class NewKey(NamedTuple):
    """A key that was just made: `token` is for its owner, `entry` for the file."""

    token: str
    entry: dict[str, Any]


def new_key(name: str, role: Role, tenant: str | None, **limits: float | str | None) -> NewKey:
    """Make a key, with those of the other fields of `Key` that are given."""
    token = f"mallee_{secrets.token_urlsafe(32)}"
    entry = {"name": name, "sha256": digest(token), "role": role, "tenant": tenant, **limits}
    return NewKey(token, {key: value for key, value in entry.items() if value is not None})


def text_of(entry: dict[str, Any]) -> str:
    """The entry as a file has it. Raises ConfigError if it can be none."""
    text = yaml.safe_dump([entry], sort_keys=False)
    parse(f"keys:\n{text}", "the new entry")
    return text


def add_to(path: Path, entry: dict[str, Any]) -> None:
    """Put a key into the file at once, or nothing; a new file is this user's alone. Raises ConfigError.

    What else stands in the file stays as it is written; its owner and mode stay, too.
    """
    import fcntl  # of POSIX, which only those who add keys need

    path = path.resolve()  # the link to a file stays one
    try:
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)  # against another one that adds
            before = path.stat() if path.exists() else None
            text = "keys: []\n" if before is None else path.read_text(encoding="utf-8")
            _replace(path, _with_entry(text, entry, str(path)), before)
        finally:
            os.close(folder)
    except (OSError, UnicodeDecodeError) as error:
        cause = getattr(error, "strerror", None) or "it is no UTF-8"
        raise ConfigError(f"{path} can't be written: {cause}; it is as it was") from error


def _with_entry(text: str, entry: dict[str, Any], source: str) -> str:
    """The file's text with one more key, found to be right."""
    num_keys = len(parse(text, source))
    document = yaml.compose(text, yaml.SafeLoader)
    assert document is not None, "it is right"
    [(_, keys)] = document.value
    start, end = keys.start_mark, keys.end_mark
    if not keys.value:
        made = f"{text[: start.index].rstrip()}\n{text_of(entry)}{text[end.index :]}"
    elif keys.flow_style:
        made = f"{text[: end.index - 1]}, {json.dumps(entry)}{text[end.index - 1 :]}"
    else:
        made = f"{text.rstrip()}\n{textwrap.indent(text_of(entry), ' ' * start.column)}"
    found = parse(made, f"{source} with the new key")
    assert len(found) == num_keys + 1, "it is added, and no other is lost"
    return made


def _replace(path: Path, text: str, before: os.stat_result | None) -> None:
    """Put a whole file in the place of `path`. Raises OSError."""
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
        made = Path(folder, path.name)
        with made.open("w", encoding="utf-8") as file:
            os.fchmod(file.fileno(), 0o600 if before is None else before.st_mode & 0o777)
            if before is not None:
                os.fchown(file.fileno(), before.st_uid, before.st_gid)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        made.replace(path)


def digest(token: str) -> str:
    """The SHA-256 of a key, as files have it."""
    return hashlib.sha256(token.encode(errors="surrogateescape")).hexdigest()


def parse(text: str, source: str) -> list[Key]:
    """The keys of a file's text. Raises ConfigError that names `source` and the fault, and no value."""
    try:
        content = yaml.load(text, _LOADER)  # noqa: S506 # a safe one
    except yaml.YAMLError as error:
        where = getattr(error, "problem_mark", None)
        line = "" if where is None else f", line {where.line + 1}"
        raise ConfigError(f"{source}: no YAML{line}") from None  # its text may hold a key
    if not isinstance(content, dict):
        raise ConfigError(f"{source}: give `keys: [...]`, as docs/security.md shows")
    try:
        return KeyFile.model_validate(content).keys
    except ValidationError as error:
        faults = "; ".join(f"{path}: {each}" for path, each in _faults(error))
        raise ConfigError(f"{source}: {faults}") from None


def _faults(error: ValidationError) -> list[tuple[str, str]]:
    """Faults without the values, which may be keys."""
    return [
        (".".join(map(str, each["loc"])), each["msg"].removeprefix("Value error, "))
        for each in error.errors(include_url=False, include_input=False)
    ]


def read_file(path: Path) -> list[Key]:
    """The keys of a file, which no other user should read: the log tells of one. Raises ConfigError."""
    try:
        with path.open(encoding="utf-8") as file:
            text, mode = file.read(), os.fstat(file.fileno()).st_mode & 0o777
    except (OSError, UnicodeDecodeError) as error:
        cause = getattr(error, "strerror", None) or "it is no UTF-8"
        raise ConfigError(f"the file of keys {path} can't be read: {cause}") from error
    if mode & 0o007:
        log.warning("%s has mode %03o: every user of this machine reads it; chmod 600", path, mode)
    return parse(text, str(path))


def of_environment(environment: Mapping[str, str]) -> list[Key]:
    """The operator's one key, if `MALLEE_API_KEY` holds it. Its requests belong to no tenant."""
    token = environment.get(ENVIRONMENT, "")
    if not token:
        return []
    if len(token) < MIN_CHARS:
        raise ConfigError(
            f"{ENVIRONMENT} has {len(token)} characters: give {MIN_CHARS} random ones at least, as"
            " `mallee keys new` makes them"
        )
    return [Key(name=ENVIRONMENT, sha256=digest(token), tenant="", role="operator")]


class KeyRing:
    """Keys, to be found by what a client sends."""

    def __init__(self, keys: Sequence[Key]) -> None:
        self.keys = tuple(keys)
        self._secret = secrets.token_bytes(32)
        self._by_digest = {self._lookup(key.sha256): key for key in keys}

    def __bool__(self) -> bool:
        return bool(self.keys)

    def find(self, token: str, now: float) -> Key | None:
        """The key with this text, unless it has expired."""
        given = digest(token)
        key = self._by_digest.get(self._lookup(given))
        if key is None or not hmac.compare_digest(key.sha256, given):
            return None
        return key if key.is_valid(now) else None

    def _lookup(self, sha256: str) -> bytes:
        return hashlib.blake2b(sha256.encode(), key=self._secret, digest_size=16).digest()
