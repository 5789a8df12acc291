"""Log records of a process, as text or JSON, with the ids that they are about.

Every process of the service calls `set_up` once; a replica of Ray Serve calls `set_up_replica`, which writes
where Serve writes. Records of ours go out from the level that is set, others' from warnings on. No record has
prompts, answers, keys or secrets: of an error that may hold a client's text only its code is logged
(`told`), and of a session a digest.
"""

import json
import logging
import re
import sys
import traceback
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Final, Literal, TypeAlias

import xxhash

from mallee.protocol.errors import MalleeError

LogLevel: TypeAlias = Literal["debug", "info", "warning", "error"]
LogFormat: TypeAlias = Literal["text", "json"]

OURS: Final = "mallee"
_FIELDS: Final = ("request", "branch", "session", "worker", "gateway", "trace_id")
_STACK: Final = "stack"  # a record's, in place of an exception
_SERVE: Final = "ray.serve"  # the logger of Ray Serve in its own processes
_HEALTH: Final = re.compile(r" /(-/healthz|health\S*|metrics) ")  # in a line about an answer
_CONTROLS: Final = {code: repr(chr(code))[1:-1] for code in (*range(32), 127, 0x85, 0x2028, 0x2029)}


def ids(
    *,
    request: str | None = None,
    branch: int | None = None,
    session: str | None = None,
    worker: str | None = None,
    gateway: str | None = None,
    trace_id: str | None = None,
) -> dict[str, Any]:
    """The `extra` of a record: those that are given."""
    given = (request, branch, session, worker, gateway, trace_id)
    return {
        name: value for name, value in zip(_FIELDS, given, strict=True) if value not in (None, "")
    }


def session_digest(tenant: str, session: str) -> str:
    """A name for a client's session in logs; "" for none."""
    return xxhash.xxh3_64_hexdigest(f"{tenant}\0{session}".encode()) if session else ""


def told(error: BaseException) -> str:
    """The text of `error` for a log: of one that a client made, which may quote it, the code alone."""
    if isinstance(error, MalleeError) and error.status < 500:
        return error.code
    return str(error)


def stack_of(error: BaseException) -> dict[str, str]:
    """For the `extra` of a record: the traceback of `error` without its text, which may quote a client."""
    lines = (*traceback.format_tb(error.__traceback__), type(error).__name__)
    return {_STACK: "".join(lines)}


def _time_of(record: logging.LogRecord) -> str:
    at = datetime.fromtimestamp(record.created, UTC)
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")


class _Formatter(logging.Formatter):
    """Base of both formats. `process` is gateway, worker or the like, `name` the instance."""

    def __init__(self, process: str, name: str) -> None:
        super().__init__()
        self._process = process
        self._name = name

    def _exception(self, record: logging.LogRecord) -> str:
        if record.exc_info:
            return self.formatException(record.exc_info)
        return str(vars(record).get(_STACK, ""))


class TextFormatter(_Formatter):
    """A line a record, and a traceback below it."""

    def format(self, record: logging.LogRecord) -> str:
        # A client's text forges no line, and half a surrogate pair can be written.
        message = record.getMessage().translate(_CONTROLS)
        message = message.encode(errors="backslashreplace").decode()
        head = f"{_time_of(record)} {record.levelname.lower():7} {self._process} {self._name}"
        line = f"{head} {record.name}: {message}"
        exception = self._exception(record)
        return f"{line}\n{exception}" if exception else line


class JsonFormatter(_Formatter):
    """An object a line."""

    def format(self, record: logging.LogRecord) -> str:
        body: dict[str, Any] = {
            "time": _time_of(record),
            "level": record.levelname.lower(),
            "process": self._process,
            "name": self._name,
            "pid": record.process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        body |= {field: vars(record)[field] for field in _FIELDS if field in vars(record)}
        if exception := self._exception(record):
            body["exception"] = exception
        return json.dumps(body, default=str)


def formatter(format_: LogFormat, process: str, name: str) -> logging.Formatter:
    """The formatter of one process."""
    return (JsonFormatter if format_ == "json" else TextFormatter)(process, name)


def is_noise(record: logging.LogRecord) -> bool:
    """Whether `record` tells that health or metrics were asked for, as probes do each second.

    Serve's line about an answer names no path, so that all of those are noise.
    """
    if record.levelno > logging.INFO:
        return False
    is_answer = vars(record).get("serve_access_log") is True
    return is_answer or _HEALTH.search(record.getMessage()) is not None


class _NoNoise(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return not is_noise(record)


class _ServeHandlers(logging.Handler):
    """Passes records on to the handlers that Serve's logger has at that time; to stderr if it has none."""

    def emit(self, record: logging.LogRecord) -> None:
        handlers: Sequence[logging.Handler] = logging.getLogger(_SERVE).handlers
        for handler in handlers or (logging.lastResort,):
            if handler is not None and record.levelno >= handler.level:
                handler.handle(record)


def set_up(level: LogLevel, format_: LogFormat, *, process: str, name: str) -> None:
    """Have this process write its records to stderr. A second call replaces the first."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter(format_, process, name))
    handler.addFilter(_NoNoise())
    _install(handler, level)


def set_up_replica(level: LogLevel, format_: LogFormat, *, process: str, name: str) -> None:
    """Have this replica write its records where Ray Serve writes its own, and both in one format.

    That is the replica's file in the folder of Serve's logs, and stderr. Serve's own level stays that of its
    `logging_config`. Once Serve gives its logger other handlers, which it does if that changes, records
    have Serve's format.
    """
    for handler in logging.getLogger(_SERVE).handlers:
        written = getattr(handler, "target", handler)  # Serve buffers what goes to its file
        written.setFormatter(formatter(format_, process, name))
        handler.addFilter(_NoNoise())
    _install(_ServeHandlers(), level)


_ours: logging.Handler | None = None  # of this process


def _install(handler: logging.Handler, level: LogLevel) -> None:
    global _ours
    root = logging.getLogger()
    if _ours is not None:
        root.removeHandler(_ours)
    _ours = handler
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    logging.getLogger(OURS).setLevel(level.upper())
