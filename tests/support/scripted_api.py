"""A loopback server that speaks in awkward pieces, as its script says."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

CAPSULE = {
    "id": "req_1.0", "object": "capsule", "created": 1, "model": "m", "worker": "w1", "status": "ready",
    "tokens": 100, "prefill_tokens": 90, "cached_tokens": 10,
}  # fmt: skip
EXTRAS = {"worker": "w1", "capsule": "req_2.1", "cached_tokens": 100, "prefill_tokens": 3}


def chunk(index: int, text: str, finish: str | None = None, **more: Any) -> bytes:
    choice = {"index": index, "text": text, "finish_reason": finish, "logprobs": None, **more}
    return b"data: " + json.dumps({"id": "req_2", "choices": [choice]}).encode() + b"\n\n"


GOOD = (
    b": hello\r\n\r\nevent: x\n"
    + chunk(1, " b")
    + chunk(0, " a")
    + chunk(1, "ü🌱").replace(b"\n\n", b"\r\n\r\n")
    + chunk(1, "", "stop", mallee=EXTRAS)
    + chunk(0, "!", "length", mallee={**EXTRAS, "capsule": None})
    + b'data: {"id": "req_2", "choices": [], "usage": {"prompt_tokens": 103, "completion_tokens": 7,\r\n'
    b'data: "total_tokens": 110, "prompt_tokens_details": {"cached_tokens": 100}}}\n\n'
    + b"data: [DONE]\n\n"
)


class Script:
    """The server's answers, and the requests that it got."""

    def __init__(self) -> None:
        self.stream = GOOD
        self.cut = 7  # bytes a write
        self.seen: list[tuple[str, str, Any, str | None]] = []
        self.url = ""
        self.health: tuple[int, Any] = (503, {"status": "unavailable"})
        self.is_gone = False  # the capsule, for DELETE
        self.pinned: bool | None = None  # the capsule, as GET says; None: left out
        self.shown: list[dict[str, Any]] = []  # what else it says of it: the next answers
        self.is_full = False  # for pins
        self.refusals: list[
            tuple[int, dict[str, str], str]
        ] = []  # status, headers, code: the next ones

    def answer(self, method: str, path: str, body: Any) -> tuple[int, Any, dict[str, str]]:
        """Status, body and headers; a body of None is the stream."""

        def refused(status: int, message: str, code: str, **more: str) -> Any:
            return status, {"error": {"message": message, "code": code, **more}}, {}

        if self.refusals:
            status, headers, code = self.refusals.pop(0)
            return (*refused(status, "not now", code)[:2], headers)
        match method, path:
            case "GET", "/health":
                return (*self.health, {})
            case "GET", "/v1/models":
                return 200, {"data": [{"id": "m"}]}, {}
            case "GET", "/v1/capsules/req_1.0":
                seen = {k: CAPSULE[k] for k in CAPSULE if "_tokens" not in k}
                seen |= {} if self.pinned is None else {"pinned": self.pinned}
                return 200, {**seen, **(self.shown.pop(0) if self.shown else {})}, {}
            case "GET", _:
                return refused(404, "capsule 'x' is not held", "capsule_not_found")
            case "DELETE", _ if self.is_gone:
                return refused(404, "gone", "capsule_not_found")
            case "DELETE", _:
                return 200, {"deleted": True}, {}
            case _, "/v1/capsules":
                return 200, CAPSULE, {}
        if path.endswith("/pin"):
            full = refused(503, "no room", "capsules_full")
            return full if self.is_full else (200, {**CAPSULE, "pinned": True}, {})
        if body.get("max_tokens") == 10**6:
            return refused(400, "too long", "context_length_exceeded", param="prompt")
        if body.get("max_tokens") == 13:
            return 502, b"<html>bad gateway</html>", {}
        return 200, None, {}


@pytest.fixture
def server() -> Iterator[Script]:
    """The service by its script, at `url`."""
    script = Script()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do(self) -> None:
            length = int(self.headers.get("Content-Length", 0))
            body = json.loads(self.rfile.read(length)) if length else None
            script.seen.append((self.command, self.path, body, self.headers.get("Authorization")))
            status, answer, headers = script.answer(self.command, self.path, body)
            if answer is None:
                headers = {"Content-Type": "text/event-stream", "Connection": "close"}
                raw, cut = script.stream, script.cut
            else:
                raw = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                headers, cut = {**headers, "Content-Length": str(len(raw))}, len(raw)
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            for at in range(0, len(raw), cut):
                self.wfile.write(raw[at : at + cut])
                self.wfile.flush()
            self.close_connection = answer is None

        do_GET = do_POST = do_DELETE = do

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: object) -> None:
            """A client that left early is part of the tests."""

    with Server(("127.0.0.1", 0), Handler) as httpd:
        thread = threading.Thread(target=httpd.serve_forever, args=(0.01,))
        thread.start()
        script.url = f"http://127.0.0.1:{httpd.server_address[1]}"
        yield script
        httpd.shutdown()
        thread.join()
