"""A Kubernetes API server that stores objects, as far as `helm install`, `upgrade` and `uninstall` ask it.

Jobs are run as they are made: their commands on this machine, in a folder with the files of their ConfigMap.
"""

import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

Object = dict[str, Any]

# Kinds that the chart makes, by the API group's version: kind and plural.
KINDS: Final = {
    "v1": {
        "Secret": "secrets",
        "ConfigMap": "configmaps",
        "Service": "services",
        "Namespace": "namespaces",
        "Pod": "pods",
        "ServiceAccount": "serviceaccounts",
    },
    "apps/v1": {"StatefulSet": "statefulsets", "Deployment": "deployments"},
    "batch/v1": {"Job": "jobs"},
    "rbac.authorization.k8s.io/v1": {"Role": "roles", "RoleBinding": "rolebindings"},
    "policy/v1": {"PodDisruptionBudget": "poddisruptionbudgets"},
    "networking.k8s.io/v1": {"NetworkPolicy": "networkpolicies", "Ingress": "ingresses"},
    "ray.io/v1": {"RayService": "rayservices", "RayCronJob": "raycronjobs"},
    "inference.networking.k8s.io/v1": {"InferencePool": "inferencepools"},
}


class Kubernetes:
    """The server's address and the objects it holds, by their path."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.objects: dict[str, Object] = {}
        self.asked: list[str] = []
        self.logs: list[str] = []  # of the containers of all Jobs
        self.is_closing = threading.Event()

    def run_job(self, namespace: str, job: Object) -> None:
        """Run a Job's containers to their end, one after the other, and note how it ended."""
        pod = job["spec"]["template"]["spec"]
        (source,) = (each["configMap"]["name"] for each in pod["volumes"] if "configMap" in each)
        files = self.objects[f"/api/v1/namespaces/{namespace}/configmaps/{source}"]["data"]
        statuses = []
        with tempfile.TemporaryDirectory() as folder:
            for name, text in files.items():
                (Path(folder) / name).write_text(text)
            for each in pod["containers"]:
                done = run_here(each, Path(folder))
                self.logs.append(done.stdout)
                statuses.append(done.returncode)
        end = "Failed" if any(statuses) else "Complete"
        job["status"] = {"conditions": [{"type": end, "status": "True", "message": str(statuses)}]}

    def secret(self, namespace: str, name: str) -> dict[str, str]:
        """The data of a Secret, as it is stored."""
        found: dict[str, str] = self.objects[f"/api/v1/namespaces/{namespace}/secrets/{name}"][
            "data"
        ]
        return found


def run_here(container: Object, folder: Path) -> "subprocess.CompletedProcess[str]":
    """The end and the output of a container's command, `mallee` in all that the chart runs so."""
    program, *arguments = (*container["command"], *container["args"])
    assert program == "mallee"
    return subprocess.run(
        [sys.executable, "-m", "mallee.cli", *arguments],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )


@contextmanager
def kubernetes() -> Iterator[Kubernetes]:
    """A server on loopback, until the block ends."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    made = Kubernetes(f"http://127.0.0.1:{server.server_address[1]}")
    server.cluster = made  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield made
    finally:
        made.is_closing.set()
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def _cluster(self) -> Kubernetes:
        found: Kubernetes = self.server.cluster  # type: ignore[attr-defined]
        return found

    def log_message(self, format: str, *args: object) -> None:
        self._cluster.asked.append(format % args)

    def _answer(self, body: Object, status: int = 200) -> None:
        raw = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def _missing(self) -> None:
        self._answer(
            {"kind": "Status", "status": "Failure", "reason": "NotFound", "code": 404}, 404
        )

    def _body(self) -> Object:
        found: Object = json.loads(
            self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}"
        )
        return found

    @property
    def _path(self) -> str:
        return self.path.partition("?")[0]

    def do_GET(self) -> None:
        if (found := _discovery(self._path)) is not None:
            self._answer(found)
        elif (each := self._cluster.objects.get(self._path)) is not None:
            self._answer(each)
        elif (kind := _kind_of(self._path)) is None or "sendInitialEvents" in self.path:
            self._missing()  # a client that may list first does so
        elif "watch=true" in self.path:
            self._watch()
        else:
            version = {"kind": f"{kind}List", "metadata": {"resourceVersion": "1"}}
            items = [v for k, v in self._cluster.objects.items() if k.startswith(f"{self._path}/")]
            self._answer({"apiVersion": _version_of(self._path), **version, "items": items})

    def _watch(self) -> None:
        """A stream without events: nothing changes by itself here, and Jobs end before they are listed."""
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.wfile.flush()
        self._cluster.is_closing.wait()

    def do_PATCH(self) -> None:
        """Server-side apply: the body is the whole object."""
        assert "apply-patch" in self.headers["Content-Type"]
        body = self._body()
        body["metadata"]["resourceVersion"] = str(len(self._cluster.asked) + 1)
        self._cluster.objects[self._path] = body
        if body["kind"] == "Job":
            self._cluster.run_job(body["metadata"]["namespace"], body)
        self._answer(body)

    def do_DELETE(self) -> None:
        self._body()
        if self._cluster.objects.pop(self._path, None) is None:
            self._missing()
        else:
            self._answer({"kind": "Status", "status": "Success"})


def _version_of(path: str) -> str:
    """The group and version of a path below /api or /apis."""
    return path.partition("/namespaces/")[0].removeprefix("/apis/").removeprefix("/api/")


def _kind_of(path: str) -> str | None:
    """The kind whose objects are listed at `path`."""
    plurals = {plural: kind for kind, plural in KINDS.get(_version_of(path), {}).items()}
    return plurals.get(path.rpartition("/")[2])


def _discovery(path: str) -> Object | None:
    """Answers that tell clients which kinds there are."""
    if path == "/version":
        return {"major": "1", "minor": "34", "gitVersion": "v1.34.0"}
    if path == "/api":
        return {"kind": "APIVersions", "versions": ["v1"]}
    if path == "/apis":
        groups = []
        for each in KINDS.keys() - {"v1"}:
            name, _, version = each.partition("/")
            told = {"groupVersion": each, "version": version}
            groups.append({"name": name, "versions": [told], "preferredVersion": told})
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
    if path == "/openapi/v3":
        known = {f"apis/{each}" if "/" in each else "api/v1": each for each in KINDS}
        where = {name: {"serverRelativeURL": f"{path}/{each}"} for name, each in known.items()}
        return {"paths": where}
    if (version := path.removeprefix("/openapi/v3/")) in KINDS:
        return _promises_validation(version)
    version = path.removeprefix("/api/").removeprefix("/apis/")
    if version not in KINDS or not path.startswith("/api"):
        return None
    verbs = ["create", "delete", "get", "list", "patch", "update", "watch"]
    resources = [
        {"name": plural, "namespaced": kind != "Namespace", "kind": kind, "verbs": verbs}
        for kind, plural in KINDS[version].items()
    ]
    return {"kind": "APIResourceList", "groupVersion": version, "resources": resources}


def _promises_validation(version: str) -> Object:
    """A document by which clients leave the validation of fields to the server."""
    group, _, name = version.rpartition("/")
    paths = {}
    for kind, plural in KINDS[version].items():
        of = {"group": group, "version": name, "kind": kind}
        validated = [{"name": "fieldValidation", "in": "query"}]
        patch = {"parameters": validated, "x-kubernetes-group-version-kind": of}
        paths[f"/{plural}"] = {"patch": patch}
    return {"openapi": "3.0.0", "info": {"title": "fake", "version": "1"}, "paths": paths}
