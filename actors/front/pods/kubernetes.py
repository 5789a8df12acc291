"""Endpoints of an InferencePool: its selector's pods, watched through Kubernetes' API.

Lists, then watches from there; a watch ends after minutes, or with an error, and then all is listed again.
The service account's token is read for each request, as Kubernetes replaces it.
Source: inference.networking.k8s.io/v1 InferencePool (spec.selector.matchLabels, spec.targetPorts), v1 Pod.
"""

import asyncio
import logging
import os
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import httpx
import msgspec

from mallee.actors.front.pods.endpoints import Endpoint, OnEndpoints
from mallee.protocol.errors import ConfigError

log = logging.getLogger(__name__)

ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
GROUP: Final = "inference.networking.k8s.io/v1"
WATCH_S: Final = 240.0  # of one watch
REQUEST_S: Final = 10.0
MAX_LINE_NBYTES: Final = 4 << 20  # one object of a watch
MAX_PODS: Final = 10_000
PAGE: Final = 500
RETRY_S: Final = (0.2, 10.0)  # first, last


class _Outdated(Exception):
    """The watch can't go on from where it was."""


_FAULTS: Final = (
    *(httpx.HTTPError, OSError, TimeoutError, ConfigError, _Outdated),
    *(ValueError, KeyError, msgspec.DecodeError),  # an answer that is not understood
)


class ApiServer(NamedTuple):
    """Kubernetes' API as a pod sees it. The token's file is read, never shown."""

    url: str
    token_file: Path | None
    ca_file: Path | None

    @classmethod
    def of_pod(cls, environ: Mapping[str, str], account: Path = ACCOUNT) -> "ApiServer":
        """As the pod's environment and its service account say. Raises ConfigError outside of a pod."""
        host, port = environ.get("KUBERNETES_SERVICE_HOST"), environ.get("KUBERNETES_SERVICE_PORT")
        if not host or not port:
            raise ConfigError(
                "KUBERNETES_SERVICE_HOST is not set: this is no pod of Kubernetes; give endpoints, or"
                " endpoints_file"
            )
        shown = f"[{host}]" if ":" in host else host
        return cls(f"https://{shown}:{port}", account / "token", account / "ca.crt")

    def client(self) -> httpx.AsyncClient:
        """Raises ConfigError if the CA can't be used."""
        verify: ssl.SSLContext | bool = True
        if self.ca_file is not None:
            try:
                verify = ssl.create_default_context(cafile=str(self.ca_file))
            except OSError as error:  # SSLError is one
                raise ConfigError(f"{self.ca_file}: {error.strerror or error}") from error
        return httpx.AsyncClient(base_url=self.url, verify=verify, timeout=REQUEST_S)

    def headers(self) -> dict[str, str]:
        """Raises OSError."""
        if self.token_file is None:
            return {}
        return {"authorization": f"Bearer {self.token_file.read_text().strip()}"}


def account_namespace(environ: Mapping[str, str], account: Path = ACCOUNT) -> str:
    """The namespace of the pod. Raises ConfigError outside of one."""
    if name := environ.get("NAMESPACE"):
        return name
    try:
        return (account / "namespace").read_text().strip()
    except OSError:
        raise ConfigError("the namespace of the pool is not known: give --namespace") from None


class PoolSpec(NamedTuple):
    """The part of an InferencePool that says which endpoints it has."""

    labels: dict[str, str]
    ports: tuple[int, ...]

    @classmethod
    def of(cls, pool: Any) -> "PoolSpec":
        """Raises ConfigError if the pool selects nothing."""
        try:
            spec = pool["spec"]
            labels = spec["selector"]["matchLabels"]
            ports = tuple(int(each["number"]) for each in spec["targetPorts"])
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"the InferencePool lacks {error}: is it of {GROUP}?") from None
        if not labels or not ports:
            raise ConfigError("the InferencePool selects no pods, or has no targetPorts")
        return cls(dict(labels), ports)

    @property
    def selector(self) -> str:
        return ",".join(f"{key}={value}" for key, value in sorted(self.labels.items()))


class PoolEndpoints:
    """The endpoints of one InferencePool, followed."""

    def __init__(self, server: ApiServer, *, namespace: str, pool: str) -> None:
        """Raises ConfigError."""
        self._server = server
        self._client = server.client()
        self._pods_path = f"/api/v1/namespaces/{namespace}/pods"
        self._pools_path = f"/apis/{GROUP}/namespaces/{namespace}/inferencepools"
        self._pool = pool
        self._spec: PoolSpec | None = None
        self._has_spec = asyncio.Event()
        self._pods_limit: asyncio.Timeout | None = (
            None  # ends the watch of pods when others are selected
        )

    async def follow(self, on_endpoints: OnEndpoints) -> None:
        async with self._client, asyncio.TaskGroup() as group:
            group.create_task(self._for_ever(self._follow_pool))
            group.create_task(self._for_ever(lambda: self._follow_pods(on_endpoints)))

    async def _for_ever(self, follow: Callable[[], Awaitable[None]]) -> None:
        """Follow again after every end; after a failure a little later each time."""
        wait_s, said = RETRY_S[0], ""
        while True:
            began = asyncio.get_running_loop().time()
            try:
                await follow()
                failure = ""
            except _FAULTS as error:
                failure = f"{type(error).__name__}: {error}"
                if failure != said and not isinstance(error, _Outdated):
                    log.warning("the InferencePool %s: %s", self._pool, failure)
            said = failure
            lasted_s = asyncio.get_running_loop().time() - began
            wait_s = RETRY_S[0] if lasted_s > RETRY_S[1] else min(2 * wait_s, RETRY_S[1])
            await asyncio.sleep(wait_s if failure else 0.0)

    async def _follow_pool(self) -> None:
        query = {"fieldSelector": f"metadata.name={self._pool}"}
        found, version = await self._list(self._pools_path, query)
        if not found:
            raise ConfigError("there is no such InferencePool in the namespace")
        self._set_spec(PoolSpec.of(found[0]))
        async for kind, pool in self._watch(self._pools_path, query, version):
            if kind in ("ADDED", "MODIFIED"):
                self._set_spec(PoolSpec.of(pool))

    def _set_spec(self, spec: PoolSpec) -> None:
        if spec != self._spec:
            self._spec = spec
            self._has_spec.set()
            if self._pods_limit is not None:
                self._pods_limit.reschedule(asyncio.get_running_loop().time())

    async def _follow_pods(self, on_endpoints: OnEndpoints) -> None:
        """Until the watch is over, or the pool selects others."""
        await self._has_spec.wait()
        spec = self._spec
        assert spec is not None
        try:
            async with asyncio.timeout(None) as self._pods_limit:
                await self._follow_selected(spec, on_endpoints)
        except TimeoutError:
            if self._spec == spec:
                raise
        finally:
            self._pods_limit = None

    async def _follow_selected(self, spec: PoolSpec, on_endpoints: OnEndpoints) -> None:
        query = {"labelSelector": spec.selector}
        listed, version = await self._list(self._pods_path, query)
        pods = {_uid(pod): pod for pod in listed}
        on_endpoints(endpoints_of(list(pods.values()), spec.ports))
        async for kind, pod in self._watch(self._pods_path, query, version):
            if kind == "DELETED":
                pods.pop(_uid(pod), None)
            elif len(pods) < MAX_PODS or _uid(pod) in pods:
                pods[_uid(pod)] = pod
            on_endpoints(endpoints_of(list(pods.values()), spec.ports))

    async def _list(self, path: str, query: Mapping[str, str]) -> tuple[list[Any], str]:
        """All objects, and the version that a watch goes on from."""
        found: list[Any] = []
        params = {**query, "limit": str(PAGE)}
        while True:
            async with asyncio.timeout(REQUEST_S):
                answer = await self._client.get(path, params=params, headers=self._server.headers())
            answer.raise_for_status()
            page = answer.json()
            found += page.get("items") or []
            version = page["metadata"]["resourceVersion"]
            rest = page["metadata"].get("continue")
            if not rest or len(found) >= MAX_PODS:
                return found[:MAX_PODS], str(version)
            params["continue"] = rest

    async def _watch(
        self, path: str, query: Mapping[str, str], version: str
    ) -> AsyncIterator[tuple[str, Any]]:
        """Changes (kind, object) from `version` on, until the watch ends. Raises _Outdated."""
        params = {
            **query,
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(int(WATCH_S)),
        }
        async with self._opened(path, params) as lines:
            async for line in lines:
                change = msgspec.json.decode(line)
                if change["type"] == "ERROR":
                    raise _Outdated(str(change["object"].get("message", "")))
                if change["type"] != "BOOKMARK":
                    yield change["type"], change["object"]

    @asynccontextmanager
    async def _opened(
        self, path: str, params: Mapping[str, str]
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        timeout = httpx.Timeout(REQUEST_S, read=WATCH_S + REQUEST_S)
        async with self._client.stream(
            "GET", path, params=dict(params), headers=self._server.headers(), timeout=timeout
        ) as answer:
            if answer.status_code == 410:
                raise _Outdated("410")
            answer.raise_for_status()
            yield _lines(answer.aiter_bytes())


async def _lines(parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Raises OSError for a line beyond MAX_LINE_NBYTES."""
    rest = bytearray()
    async for part in parts:
        rest += part
        *whole, last = rest.split(b"\n")
        for line in whole:
            if line:
                yield bytes(line)
        rest = bytearray(last)
        if len(rest) > MAX_LINE_NBYTES:
            raise OSError(f"a line of more than {MAX_LINE_NBYTES} bytes in a watch")


def _uid(pod: Any) -> str:
    return str(pod["metadata"]["uid"])


def endpoints_of(pods: Sequence[Any], ports: Sequence[int]) -> list[Endpoint]:
    """An endpoint for each port of each pod that runs: ready ones, and those that drain."""
    found: dict[str, Endpoint] = {}
    for pod in sorted(pods, key=lambda pod: str(pod["metadata"].get("creationTimestamp"))):
        status, ip = pod.get("status") or {}, (pod.get("status") or {}).get("podIP")
        if not ip or status.get("phase") != "Running":
            continue
        conditions = {each["type"]: each["status"] for each in status.get("conditions") or ()}
        is_leaving = pod["metadata"].get("deletionTimestamp") is not None
        is_ready = conditions.get("Ready") == "True"
        host = f"[{ip}]" if ":" in ip else ip
        for rank, port in enumerate(ports):
            address = f"{host}:{port}"
            found[address] = Endpoint(address, rank, _uid(pod), is_leaving or not is_ready)
    return list(found.values())


def server_of(url: str | None) -> ApiServer:
    """The API at `url` without an account, as `kubectl proxy` serves it; by default that of this pod."""
    if url is not None:
        return ApiServer(url, None, None)
    return ApiServer.of_pod(os.environ)
