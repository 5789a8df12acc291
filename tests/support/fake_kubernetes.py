"""A Kubernetes API server that stores objects, as far as `helm install`, `upgrade` and `uninstall` ask it."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
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
    "rbac.authorization.k8s.io/v1": {"Role": "roles", "RoleBinding": "rolebindings"},
    "policy/v1": {"PodDisruptionBudget": "poddisruptionbudgets"},
    "networking.k8s.io/v1": {"NetworkPolicy": "networkpolicies", "Ingress": "ingresses"},
    "ray.io/v1": {"RayService": "rayservices"},
    "inference.networking.k8s.io/v1": {"InferencePool": "inferencepools"},
}


class Kubernetes:
    """The server's address and the objects it holds, by their path."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.objects: dict[str, Object] = {}
        self.asked: list[str] = []

    def secret(self, namespace: str, name: str) -> dict[str, str]:
        """The data of a Secret, as it is stored."""
        found: dict[str, str] = self.objects[f"/api/v1/namespaces/{namespace}/secrets/{name}"][
            "data"
        ]
        return found


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
        server.shutdown()
        server.server_close()
        thread.join()


def _merge(old: Any, patch: Any) -> Any:
    """RFC 7386, which Helm sends for kinds it does not know, and close enough for the others here."""
    if not isinstance(patch, dict) or not isinstance(old, dict):
        return patch
    result = dict(old)
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        elif not key.startswith("$"):
            result[key] = _merge(old.get(key), value)
    return result


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

    def _store(self, path: str, body: Object, status: int) -> None:
        body.setdefault("metadata", {})["resourceVersion"] = str(len(self._cluster.asked) + 1)
        self._cluster.objects[path] = body
        self._answer(body, status)

    def do_GET(self) -> None:
        if (found := _discovery(self._path)) is not None:
            self._answer(found)
        elif (each := self._cluster.objects.get(self._path)) is not None:
            self._answer(each)
        elif self._path.rsplit("/", 1)[-1] in {
            p for kinds in KINDS.values() for p in kinds.values()
        }:
            items = [o for p, o in self._cluster.objects.items() if p.startswith(f"{self._path}/")]
            self._answer({"kind": "List", "apiVersion": "v1", "metadata": {}, "items": items})
        else:
            self._missing()

    def do_POST(self) -> None:
        body = self._body()
        self._store(f"{self._path}/{body['metadata']['name']}", body, 201)

    def do_PUT(self) -> None:
        self._store(self._path, self._body(), 200)

    def do_PATCH(self) -> None:
        patch, old = self._body(), self._cluster.objects.get(self._path)
        is_apply = "apply-patch" in (self.headers.get("Content-Type") or "")
        if old is None and not is_apply:
            self._missing()
        else:
            self._store(self._path, patch if is_apply else _merge(old, patch), 200)

    def do_DELETE(self) -> None:
        self._body()
        if self._cluster.objects.pop(self._path, None) is None:
            self._missing()
        else:
            self._answer({"kind": "Status", "status": "Success"})


def _discovery(path: str) -> Object | None:
    """Answers that tell clients which kinds there are."""
    groups = [version for version in KINDS if version != "v1"]
    if path == "/version":
        return {"major": "1", "minor": "34", "gitVersion": "v1.34.0"}
    if path == "/api":
        return {"kind": "APIVersions", "versions": ["v1"]}
    if path == "/apis":
        names = [(version.split("/")[0], version) for version in groups]
        return {
            "kind": "APIGroupList",
            "apiVersion": "v1",
            "groups": [
                {
                    "name": name,
                    "versions": [{"groupVersion": version, "version": "v1"}],
                    "preferredVersion": {"groupVersion": version, "version": "v1"},
                }
                for name, version in names
            ],
        }
    if path == "/openapi/v3":
        prefixes = {
            version: "api/v1" if version == "v1" else f"apis/{version}" for version in KINDS
        }
        return {
            "paths": {
                prefix: {"serverRelativeURL": f"/openapi/v3/{version}?hash=1"}
                for version, prefix in prefixes.items()
            }
        }
    if (version := path.removeprefix("/openapi/v3/")) in KINDS:
        return _promises_validation(version)
    version = path.removeprefix("/api/").removeprefix("/apis/")
    if version not in KINDS or not path.startswith("/api"):
        return None
    return {
        "kind": "APIResourceList",
        "apiVersion": "v1",
        "groupVersion": version,
        "resources": [
            {
                "name": plural,
                "singularName": kind.lower(),
                "namespaced": kind != "Namespace",
                "kind": kind,
                "verbs": ["create", "delete", "get", "list", "patch", "update", "watch"],
            }
            for kind, plural in KINDS[version].items()
        ],
    }


def _promises_validation(version: str) -> Object:
    """A document by which clients leave the validation of fields to the server."""
    group, _, name = version.rpartition("/")
    return {
        "openapi": "3.0.0",
        "info": {"title": "fake", "version": "1"},
        "paths": {
            f"/{plural}": {
                "patch": {
                    "parameters": [{"name": "fieldValidation", "in": "query"}],
                    "x-kubernetes-group-version-kind": {
                        "group": group,
                        "version": name,
                        "kind": kind,
                    },
                }
            }
            for kind, plural in KINDS[version].items()
        },
    }
