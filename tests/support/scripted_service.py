"""A service over real HTTP whose answers a test gives, and which can go away and come back at its address."""

import json
import threading
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeAlias
from urllib.parse import urlsplit

from mallee.actors.addresses import free_port

Body: TypeAlias = str | dict[str, Any]
Answer: TypeAlias = Body | tuple[int, Body] | Callable[[], Body]


class ScriptedService:
    """Answers by method and path, as `"GET /health"`; all others are 404. A context manager."""

    def __init__(self, answers: dict[str, Answer]) -> None:
        self.answers = answers
        self.asked: list[str] = []
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._server: ThreadingHTTPServer | None = None

    def start(self) -> None:
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                asked = f"{self.command} {urlsplit(self.path).path}"
                service.asked.append(asked)
                found = service.answers.get(asked, (404, error("no such path", "not_found")))
                body = found() if callable(found) else found
                status, body = body if isinstance(body, tuple) else (200, body)
                raw = (body if isinstance(body, str) else json.dumps(body)).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(raw)))
                self.end_headers()
                with suppress(BrokenPipeError, ConnectionResetError):  # the client has given up
                    self.wfile.write(raw)

            do_POST = do_DELETE = do_GET

            def log_message(self, format: str, *args: Any) -> None:
                """Tells nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def __enter__(self) -> "ScriptedService":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def error(message: str, code: str) -> dict[str, Any]:
    """A body in OpenAI's shape."""
    return {"error": {"message": message, "type": "invalid_request_error", "code": code}}
