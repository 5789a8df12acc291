"""Records as text and JSON: their fields, what is left out of them, and the loggers that they come from."""

import io
import json
import logging
import logging.handlers
import sys
from typing import Any

import pytest

from mallee.protocol.errors import InvalidParameter, WorkerLost
from mallee.runtime.telemetry import logs
from mallee.runtime.telemetry.logs import (
    LogFormat,
    LogLevel,
    formatter,
    ids,
    session_digest,
    stack_of,
    told,
)


class Captured:
    """The lines of a process, whose logs are set up as it would."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self._err = io.StringIO()

    def set_up(self, level: LogLevel, format_: LogFormat) -> logging.Logger:
        self._monkeypatch.setattr(sys, "stderr", self._err)
        logs.set_up(level, format_, process="gateway", name="g0")
        return logging.getLogger("mallee.some.module")

    @property
    def lines(self) -> list[str]:
        return self._err.getvalue().splitlines()

    @property
    def objects(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.lines]


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> Captured:
    return Captured(monkeypatch)


def test_a_json_line_has_level_process_and_ids(captured: Captured) -> None:
    captured.set_up("info", "text")
    log = captured.set_up("info", "json")  # it replaces the first
    log.warning(
        "%s, branch %d: gone", "r-1", 0, extra=ids(request="r-1", branch=0, worker="w2", session="")
    )
    (line,) = captured.objects
    assert line.pop("time").endswith("Z")
    assert line.pop("pid") > 0
    assert line == {
        "level": "warning",
        "process": "gateway",
        "name": "g0",
        "logger": "mallee.some.module",
        "message": "r-1, branch 0: gone",
        "request": "r-1",
        "branch": 0,
        "worker": "w2",
    }


def test_a_line_of_text_names_time_level_process_and_logger(captured: Captured) -> None:
    captured.set_up("info", "text").error("it broke")
    (line,) = captured.lines
    assert line.partition(" ")[2] == "error   gateway g0 mallee.some.module: it broke"


@pytest.mark.parametrize(
    ("level", "shown"), [("debug", "diwe"), ("info", "iwe"), ("warning", "we"), ("error", "e")]
)
def test_the_level_counts_for_our_records(captured: Captured, level: LogLevel, shown: str) -> None:
    log = captured.set_up(level, "json")
    for write, letter in ((log.debug, "d"), (log.info, "i"), (log.warning, "w"), (log.error, "e")):
        write(letter)
    assert "".join(line["message"] for line in captured.objects) == shown


@pytest.mark.parametrize("path", ["/health", "/health/live", "/health/ready", "/metrics"])
def test_probes_and_chatter_of_libraries_leave_no_line(captured: Captured, path: str) -> None:
    log = captured.set_up("debug", "json")
    log.info("GET %s 200 0.4ms", path)
    log.info("POST /v1/completions 200 9.0ms")
    log.error("GET %s 500 0.4ms", path)
    logging.getLogger("nats.client").info("of other libraries only warnings are written")
    logging.getLogger("asyncio").warning("a task was lost")
    assert [line["level"] for line in captured.objects] == ["info", "error", "warning"]


def test_text_of_a_client_forges_no_line(captured: Captured) -> None:
    captured.set_up("info", "text").warning(
        "%s", "x\n2026-01-01 error gateway g0 all is lost\u2028"
    )
    assert len(captured.lines) == 1
    assert "x\\n2026" in captured.lines[0]


@pytest.mark.parametrize("form", ["text", "json"])
def test_any_text_can_be_written(form: LogFormat) -> None:
    """Half a surrogate pair, too, which no UTF-8 has."""
    record = logging.makeLogRecord({"msg": "\ud800 ü"})  # not logged: pytest would report it
    assert "\\ud800 " in formatter(form, "gateway", "g0").format(record).encode().decode()


def test_errors_that_quote_a_client_are_told_by_their_code() -> None:
    assert told(InvalidParameter("grammar", "my secret", "give another")) == "invalid_parameter"
    assert "w3" in told(WorkerLost("w3", "killed"))


def test_a_stack_has_no_text_of_its_error(captured: Captured) -> None:
    log = captured.set_up("info", "json")
    try:
        raise KeyError("my secret")
    except KeyError as error:
        log.error("it broke", extra=stack_of(error))
    (line,) = captured.objects
    assert "test_a_stack_has_no_text" in line["exception"]
    assert line["exception"].endswith("KeyError")
    assert "my secret" not in line["exception"].replace('KeyError("my secret")', "")


def test_a_session_is_named_by_a_digest() -> None:
    assert session_digest("acme", "john@example.com") == session_digest("acme", "john@example.com")
    assert session_digest("acme", "s") != session_digest("other", "s")
    assert session_digest("acme", "") == ""
    assert "john" not in session_digest("acme", "john@example.com")


def test_a_replica_writes_where_serve_writes_and_as_the_settings_say(captured: Captured) -> None:
    serve, stream = logging.getLogger("ray.serve"), io.StringIO()
    before = serve.handlers, serve.propagate, serve.level
    file = logging.StreamHandler(stream)
    file.setFormatter(logging.Formatter("serve's: %(message)s"))
    serve.handlers = [logging.handlers.MemoryHandler(1, target=file)]
    serve.propagate = False
    serve.setLevel(logging.INFO)
    try:
        logs.set_up_replica("warning", "json", process="worker", name="w0")
        serve.info("GET /health 200 0.3ms")
        serve.info("GET / 200 0.3ms", extra={"serve_access_log": True})
        serve.info("Started.")
        logging.getLogger("mallee.x").info("ours, below the level")
        logging.getLogger("mallee.x").warning("ours", extra=ids(worker="w0"))
    finally:
        serve.handlers, serve.propagate = before[:2]
        serve.setLevel(before[2])
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [(line["logger"], line["message"]) for line in lines] == [
        ("ray.serve", "Started."),
        ("mallee.x", "ours"),
    ]
    assert lines[1]["worker"] == "w0"
