"""A small verifier over HTTP on loopback, in threads of its own."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple


class Raw(NamedTuple):
    """An answer as it stands."""

    status: int
    body: bytes = b""
    headers: dict[str, str] = {}


class Verifier:
    """Scores each branch of a question by `score(branch)`; if `reply` is set, that answers the question."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.score: Callable[[dict[str, Any]], float | None] = lambda branch: 1.0
        self.reply: Callable[[dict[str, Any]], Raw] | None = None
        self.questions: list[dict[str, Any]] = []
        self.heads: list[dict[str, str]] = []  # header lines of each question
        self.paths: list[str] = []
        self.running = self.most_running = 0
        self._lock = threading.Lock()

    def answer(self, question: dict[str, Any], path: str, headers: dict[str, str]) -> Raw:
        with self._lock:
            self.questions.append(question)
            self.paths.append(path)
            self.heads.append(headers)
            self.running += 1
            self.most_running = max(self.most_running, self.running)
        try:
            if self.reply is not None:
                return self.reply(question)
            return verdict([self.score(branch) for branch in question["branches"]])
        finally:
            with self._lock:
                self.running -= 1

    def seen(self, index: int) -> list[dict[str, Any]]:
        """The branch in all questions that were about it."""
        return [b for each in self.questions for b in each["branches"] if b["index"] == index]


def verdict(scores: list[Any]) -> Raw:
    return Raw(200, json.dumps({"scores": scores}).encode())


@contextmanager
def verifying() -> Iterator[Verifier]:
    """A verifier at a free port; its address is `url`."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = 1 << 16  # head and body at once: else the kernel waits with the body for 40 ms

        def do_POST(self) -> None:
            raw = self.rfile.read(int(self.headers["content-length"]))
            status, body, headers = verifier.answer(
                json.loads(raw), self.path, {k.lower(): v for k, v in self.headers.items()}
            )
            try:
                self.send_response(status)
                for name, value in {"content-length": str(len(body)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)
            except (BrokenPipeError, ConnectionResetError):
                self.close_connection = True  # the caller has hung up

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    verifier = Verifier(f"http://127.0.0.1:{server.server_address[1]}/verify")
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield verifier
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
