"""A whole Mallee on this machine, in one call: Ray, broker, gateway and workers, loopback only.

Everything it starts is a child of this process's Ray and ends with `close`.
"""

import logging
import os
import secrets
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

from mallee.actors.build import open_access
from mallee.actors.checks import check_files, shortages
from mallee.protocol.errors import ConfigError, NoWorker
from mallee.runtime.addresses import base_url, listener
from mallee.runtime.bus.broker import check_folder, check_operators_broker
from mallee.runtime.config import AppConfig
from mallee.runtime.proxy.choice import KEEP_ALIVE_S, SWITCH, is_haproxy_on, serving_environment

log = logging.getLogger(__name__)

APP_NAME = "mallee"
START_TIMEOUT_S = 180.0
CLOSE_TIMEOUT_S = 20.0
DRAIN_MARGIN_S = 5.0
REMOVE_TIMEOUT_S = 5.0
LOOK_S = 0.1
TELL_S = 5.0
NICENESS = "RAY_worker_niceness"
RAY_IS_LATE = "timed out during startup"
RAY_STARTS = 3  # times, before that is an error
MAX_TEMPORARY_CHARS = 11
"""Of the folder for temporary files: below it HAProxy's sockets have 96, and there may be 107 in all."""
OBJECT_STORE_BYTES = 100 * 1024 * 1024  # nothing of ours lives there


class LocalStack:
    """A running service at `base_url`. Use as a context manager.

    `tell` is called while it starts, every few seconds, with what that waits for.
    """

    def __init__(
        self,
        config: AppConfig,
        *,
        host: str = "127.0.0.1",
        port: int = 8000,
        tell: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        self.config = config
        self.base_url = base_url(host, port)
        self._host = host
        self._port = port
        self._is_up = False
        self._serves = False
        self._tell = tell
        self._begun = self._told = time.monotonic()
        folder = tempfile.gettempdir()
        short = folder if len(folder) <= MAX_TEMPORARY_CHARS else "/tmp"  # noqa: S108
        self._folder = Path(tempfile.mkdtemp(prefix="mallee-", dir=short))
        if short != folder:
            log.info("TMPDIR=%s is too long for HAProxy's sockets: they are in %s", folder, short)
        self._environment = _Environment()

    @property
    def proxy(self) -> str:
        """The proxy before the gateways, by name; known once it is started."""
        return "HAProxy" if is_haproxy_on() else "Ray's Python proxy"

    def start(self) -> None:
        """Returns when every worker is registered. Raises NoWorker if that takes too long.

        What can be wrong is looked for first, in this process, where its error is one clear line. If
        it fails, nothing of it is left running.
        """
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        self._tell("checking the settings, the model and its files ...")
        self._check()
        http = self.config.http
        proxy = serving_environment(
            self._folder,
            max_connections=http.max_connections,
            max_per_client=http.max_connections_per_client,
        )
        self._environment.set(loopback_environment() | proxy)
        from ray import serve  # heavy, and needs the environment above
        from ray.exceptions import RayError

        from mallee.actors.app import build_application

        self._tell("starting Ray ...")
        options: dict[str, Any] = {
            "address": "local",
            "include_dashboard": False,
            "object_store_memory": OBJECT_STORE_BYTES,
            "log_to_driver": False,
            "logging_level": "ERROR",
            "_node_ip_address": "127.0.0.1",
        }
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        with _own_signal_handlers():
            _start_ray(options)
        self._is_up = True
        _end_idle_helpers()
        check_gpus(self.config)
        # Gateways listen on the same address as the proxy: with HAProxy on every one by default.
        try:
            start_serve(self._host, self._port)
        except RayError as error:
            raise ConfigError(
                f"{self.proxy} did not start at {self.base_url}: try again where the machine is busy, or set"
                f" {SWITCH}={int(not is_haproxy_on())} for the other one"
            ) from error
        target = serve.RunTarget(build_application(self.config), name=APP_NAME, route_prefix="/")
        try:
            serve.run_many([target], wait_for_applications_running=False)
            self._wait_until_running()
        except RuntimeError as error:
            raise ConfigError(f"the service did not start: {cause(error)}") from error
        self._wait()
        self._serves = True

    def close(self) -> None:
        """Stop everything that `start` started. Idempotent."""
        if self._is_up:
            self._is_up = False
            self._stop()
        self._environment.restore()
        remove_folder(self._folder)

    def _stop(self) -> None:
        import ray

        # In a thread: with Ray itself gone (killed, say) the calls would never come back.
        stopping = threading.Thread(target=self._end_service, daemon=True)
        stopping.start()
        with suppress(KeyboardInterrupt):  # a second Ctrl-C: requests that run are given up
            stopping.join(self.config.drain_s + CLOSE_TIMEOUT_S)
        ray.shutdown()

    def _end_service(self) -> None:
        drain_and_delete(self.config.drain_s if self._serves else None)

    def __enter__(self) -> "LocalStack":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check(self) -> None:
        """Raises MalleeError if the settings, the address, the broker or its folder can't be used here."""
        check_files(self.config)
        # Of GPUs Ray knows more.
        for shortage in shortages(self.config, counts_gpus=False):
            raise ConfigError(shortage)
        open_access(self.config).check_listening(self._host)
        listener(self._host, self._port).close()
        if self.config.nats_url is not None:
            check_operators_broker(self.config)
        if self.config.store_folder is not None:
            check_folder(self.config.store_folder)

    def _wait_until_running(self) -> None:
        """Wait for the replicas; a model may load for long. Raises RuntimeError if they fail."""
        from ray import serve

        while (app := serve.status().applications[APP_NAME]).status != "RUNNING":
            if app.status == "DEPLOY_FAILED":
                raise RuntimeError(app.message)
            missing = [
                " ".join(
                    (
                        name,
                        *(f"({n} {each.lower()})" for each, n in found.replica_states.items()),
                        _last_line(found.message),  # why one failed before
                    )
                ).rstrip()
                for name, found in app.deployments.items()
                if found.status != "HEALTHY"
            ]
            self._tell_wait(", ".join(missing) or "Ray Serve")
            time.sleep(LOOK_S)

    def _tell_wait(self, part: str) -> None:
        now = time.monotonic()
        if now - self._told >= TELL_S:
            self._told = now
            self._tell(f"waiting for {part}, {now - self._begun:.0f} s so far ...")

    def _wait(self) -> None:
        """Wait until the gateway is well."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if is_well(self.base_url):
                return
            self._tell_wait("workers to register")
            time.sleep(LOOK_S)
        raise NoWorker(
            f"not all of {self.config.num_workers} workers registered in {START_TIMEOUT_S:.0f} s"
        )


def check_gpus(config: AppConfig) -> None:
    """Raises ConfigError if this machine has too few GPUs: workers would wait for them for ever."""
    from mallee.actors import cluster  # Ray

    wanted, there = config.worker_gpus * config.workers, cluster.num_gpus()
    if wanted > there:
        raise ConfigError(
            f"workers={config.workers} ask for {wanted:g} GPUs (ray.worker_gpus={config.worker_gpus:g}), and"
            f" Ray finds {there:g} on this machine: fewer workers, a fraction each, or engine.device: cpu"
        )


def start_serve(host: str, port: int, **options: Any) -> None:
    """Start Ray Serve with its entry there. Raises RayError."""
    from ray import serve

    http: dict[str, Any] = {"host": host, "port": port, "keep_alive_timeout_s": KEEP_ALIVE_S}
    serve.start(http_options=http, logging_config={"log_level": "ERROR"}, **options)


def is_well(url: str) -> bool:
    """Whether a gateway is: its answer to a caller without a key says no more."""
    with suppress(httpx.HTTPError, ValueError):
        answer = httpx.get(f"{url}/health", timeout=5.0, trust_env=False)
        return bool(answer.json().get("status") == "ok")
    return False


def remove_folder(folder: Path) -> None:
    """Ray's processes may write into it for a moment after they were ended."""
    deadline = time.monotonic() + REMOVE_TIMEOUT_S
    while folder.exists() and time.monotonic() < deadline:
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(0.05)


@contextmanager
def _own_signal_handlers() -> Iterator[None]:
    """Ray puts its own handlers in place (on SIGTERM it aborts with a dump): give ours back."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Environment:
    """Variables of this process that are set for a while."""

    def __init__(self) -> None:
        self._before: dict[str, str | None] = {}

    def set(self, values: Mapping[str, str]) -> None:
        self._before = {name: os.environ.get(name) for name in values}
        os.environ.update(values)

    def restore(self) -> None:
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        self._before = {}


def cluster_environment() -> dict[str, str]:
    """Variables for a Ray of our own, whose new token keeps other users of this machine out."""
    return {
        "RAY_USAGE_STATS_ENABLED": os.environ.get("RAY_USAGE_STATS_ENABLED", "0"),
        # Ray runs its workers at niceness 15: gateways, engines and HAProxy would wait for everything else.
        NICENESS: os.environ.get(NICENESS, "0"),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
    }


def loopback_environment() -> dict[str, str]:
    """The same, for a Ray that other machines don't reach; Ray reads it when it is imported.

    Ray's servers listen on every interface unless the node's own address is the loopback one, and on
    Linux only this variable makes it that (its name says where it is the default).
    """
    return {
        **cluster_environment(),
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": os.environ.get(
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0"
        ),
    }


def drain_and_delete(drain_s: float | None) -> None:
    """End the service of this process's Ray, after requests that run had `drain_s` to end, if given."""
    from ray import serve
    from ray.exceptions import RayError
    from ray.serve.exceptions import RayServeException

    if drain_s is not None:
        gateways = serve.get_deployment_handle("Gateway", APP_NAME)
        # A gateway that dies meanwhile has nothing left to drain.
        with suppress(RayError, RayServeException, TimeoutError):
            gateways.broadcast("drain", drain_s).results(timeout_s=drain_s + DRAIN_MARGIN_S)
    # Not serve.shutdown: it kills the controller and Ray then prints that a task of it failed.
    serve.delete(APP_NAME)


def _start_ray(options: dict[str, Any]) -> None:
    """Start Ray, again if it is late: it ends itself where its agent takes over 15 s to come up.

    That limit can't be set (ray-project/ray#65983), and a busy machine meets it. Raises ConfigError.
    """
    import ray

    for left in reversed(range(RAY_STARTS)):
        try:
            ray.init(**options)
            return
        except OSError as error:
            if not isinstance(error, PermissionError) and "AF_UNIX" not in str(error):
                raise
            raise ConfigError(
                f"Ray did not start: {error}; set TMPDIR (or RAY_TMPDIR) to a short folder of yours"
            ) from error
        except Exception as error:
            # Ray has no class of its own for a late node; by its text no other fault is taken for one.
            if type(error) is not Exception or RAY_IS_LATE not in str(error):
                raise
            ray.shutdown()
            if left:
                log.warning("Ray did not start: %s It is started again", error)
                continue
            raise ConfigError(
                f"Ray did not start, {RAY_STARTS} times: {error} It waits 30 s for its processes:"
                " free a core or memory, try again"
            ) from error


def _end_idle_helpers() -> None:
    """End what only waits in a Ray of one machine: the scaler of clusters, the reader of logs, and what stays
    of a dashboard that is off. They take 180 MB and can't be left out (measured)."""
    from ray._private.worker import global_worker

    for end in ("kill_monitor", "kill_log_monitor", "kill_dashboard"):
        if (kill := getattr(global_worker.node, end, None)) is not None:  # not in every version
            kill(check_alive=False)


def cause(error: Exception) -> str:
    """Serve's message about the first deployment that failed, or the error itself."""
    from ray import serve

    for deployment in serve.status().applications[APP_NAME].deployments.values():
        if "UNHEALTHY" in str(deployment.status) or "FAILED" in str(deployment.status):
            return _last_line(deployment.message) or str(error)
    return str(error)


def _last_line(message: str) -> str:
    """The sentence of Serve's message about a deployment; "" without one."""
    return message.strip().rpartition("\n")[2].strip()
