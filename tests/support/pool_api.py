"""Kubernetes' API as a picker asks it: lists and watches of pods and InferencePools, and its faults."""

import asyncio
import json
from typing import Any

PODS = "/api/v1/namespaces/models/pods"
POOLS = "/apis/inference.networking.k8s.io/v1/namespaces/models/inferencepools"


def pod(name: str, ip: str, *, ready: bool = True, labels: str = "llama") -> dict[str, Any]:
    return {
        "metadata": {"uid": name, "name": name, "labels": {"app": labels}},
        "status": {
            "phase": "Running",
            "podIP": ip,
            "conditions": [{"type": "Ready", "status": "True" if ready else "False"}],
        },
    }


def pool(*ports: int, app: str = "llama") -> dict[str, Any]:
    return {
        "metadata": {"uid": "pool", "name": "llama"},
        "spec": {
            "selector": {"matchLabels": {"app": app}},
            "targetPorts": [{"number": port} for port in ports],
        },
    }


class FakeApi:
    """Lists and watches of pods and pools. `objects` change by `change`, which watchers hear of."""

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, Any]] = {PODS: {}, POOLS: {}}
        self.requests: list[tuple[str, dict[str, str]]] = []
        self.tokens: set[str] = set()
        self.refusal = 0  # a status that all get
        self.page = 500
        self._watchers: dict[str, list[asyncio.StreamWriter]] = {PODS: [], POOLS: []}
        self._server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def __aenter__(self) -> "FakeApi":
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        self.hang_up()

    def change(self, kind: str, path: str, thing: dict[str, Any]) -> None:
        uid = thing["metadata"]["uid"]
        if kind == "DELETED":
            self.objects[path].pop(uid)
        else:
            self.objects[path][uid] = thing
        self.tell(path, {"type": kind, "object": thing})

    def tell(self, path: str, event: dict[str, Any]) -> None:
        raw = json.dumps(event).encode() + b"\n"
        for writer in self._watchers[path]:
            half = len(raw) // 2
            for part in (raw[:half], raw[half:]):
                writer.write(b"%x\r\n%s\r\n" % (len(part), part))

    def num_watchers(self, path: str) -> int:
        return len(self._watchers[path])

    def hang_up(self) -> None:
        """End every watch in the middle."""
        for writers in self._watchers.values():
            for writer in writers:
                writer.close()
            writers.clear()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                method, target, _ = head[0].split(" ")
                assert method == "GET", target
                path, _, query = target.partition("?")
                params = dict(part.split("=", 1) for part in query.split("&") if part)
                self.requests.append((path, params))
                self.tokens |= {
                    line[22:] for line in head if line.startswith("authorization: Bearer ")
                }
                if self.refusal:
                    self._answer(writer, self.refusal, {})
                elif params.get("watch"):
                    writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
                    self._watchers[path].append(writer)
                    return
                else:
                    self._answer(writer, 200, self._listed(path, params))
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    def _listed(self, path: str, params: dict[str, str]) -> dict[str, Any]:
        app = params.get("labelSelector", "").rpartition("%3D")[2]
        items = [
            each
            for each in self.objects[path].values()
            if path == POOLS or each["metadata"]["labels"]["app"] == app
        ]
        start = int(params.get("continue", 0))
        end = start + self.page
        metadata = {"resourceVersion": "7"} | ({"continue": str(end)} if end < len(items) else {})
        return {"metadata": metadata, "items": items[start:end]}

    def _answer(self, writer: asyncio.StreamWriter, status: int, body: dict[str, Any]) -> None:
        raw = json.dumps(body).encode()
        head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\n"
        writer.write(f"{head}content-length: {len(raw)}\r\n\r\n".encode() + raw)
