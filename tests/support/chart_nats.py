"""The chart's NATS on this machine: real servers by its ConfigMap, with passwords of its Secret."""

import base64
import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from mallee.runtime.addresses import free_port
from mallee.runtime.bus.broker import find_binary
from support.chart import Object, one
from support.waiting import wait_until


class Servers:
    """The pods of the StatefulSet, each with ports of its own, for they share this machine."""

    def __init__(self, found: list[Object], folder: Path) -> None:
        self._container = one(found, "StatefulSet")["spec"]["template"]["spec"]["containers"][0]
        self._conf = one(found, "ConfigMap", "mallee-nats")["data"]["nats.conf"]
        self._secret = {
            key: base64.b64decode(value).decode()
            for key, value in one(found, "Secret", "mallee-nats")["data"].items()
        }
        self._folder = folder
        self.clients = [free_port() for _ in range(3)]
        self.monitors = [free_port() for _ in range(3)]
        self._routes = [free_port() for _ in range(3)]
        self.processes = [self._start(i) for i in range(3)]

    def _start(self, i: int) -> "subprocess.Popen[bytes]":
        folder = self._folder / str(i)
        folder.mkdir()
        conf = self._conf.replace("/var/run/nats", str(folder)).replace("/data", f"{folder}/data")
        for port, own in ((4222, self.clients), (6222, self._routes), (8222, self.monitors)):
            conf = conf.replace(f": {port}\n", f": {own[i]}\n")
        # Addresses of this machine; a server listens on loopback alone.
        conf = "host: 127.0.0.1\n" + conf.replace("cluster: {", "cluster: {\n  host: 127.0.0.1")
        (folder / "nats.conf").write_text(conf)
        binary = find_binary()
        assert binary is not None
        with (folder / "log").open("wb") as log:
            return subprocess.Popen(
                [str(binary), "--config", str(folder / "nats.conf")],
                env={**os.environ, **self._environment(i)},
                stdout=log,
                stderr=log,
            )

    def _environment(self, i: int) -> dict[str, str]:
        """The container's variables, as Kubernetes resolves them."""
        made = {"POD_NAME": f"mallee-nats-{i}"}
        for each in self._container["env"]:
            if "secretKeyRef" in (source := each.get("valueFrom", {})):
                made[each["name"]] = self._secret[source["secretKeyRef"]["key"]]
            elif "value" in each:
                value = re.sub(r"\$\((\w+)\)", lambda found: made[found[1]], each["value"])
                host = re.fullmatch(
                    r"(.*@)mallee-nats-(\d)\.mallee-nats-servers\.llm\.svc:6222", value
                )
                assert host is not None, value
                made[each["name"]] = f"{host[1]}127.0.0.1:{self._routes[int(host[2])]}"
        return made

    def login(self, role: str) -> tuple[str, str]:
        user, _, password = self._secret[role].partition(":")
        return user, password

    def others(self, i: int) -> set[str]:
        return {f"mallee-nats-{j}" for j in range(3) if j != i}

    def routes(self, i: int) -> set[str]:
        """Names of the servers that one is connected to."""
        try:
            found: Object = httpx.get(
                f"http://127.0.0.1:{self.monitors[i]}/routez", timeout=5
            ).json()
        except httpx.HTTPError:
            return set()
        return {each["remote_name"] for each in found["routes"]}


@contextmanager
def running(found: list[Object], folder: Path) -> Iterator[Servers]:
    """The servers of a rendered release, connected to each other."""
    made = Servers(found, folder)
    try:
        wait_until(lambda: all(made.routes(i) == made.others(i) for i in range(3)), timeout_s=60)
        yield made
    finally:
        for process in made.processes:
            process.terminate()
        for process in made.processes:
            process.wait(10)
