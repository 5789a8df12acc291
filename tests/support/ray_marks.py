"""Ray with Serve in pytest's own process, and the marks of tests that start it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from mallee.runtime.addresses import free_port
from mallee.runtime.proxy.choice import KEEP_ALIVE_S, serving_environment
from support.folders import short_folder

PROCESS_MARKS: Final = [
    pytest.mark.process,
    pytest.mark.ray,
    pytest.mark.nats,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::pydantic.PydanticDeprecatedSince20"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray"),
    pytest.mark.filterwarnings("ignore::FutureWarning:ray"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # Ray's own pipes and sockets
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@contextmanager
def local_serve() -> Iterator[int]:
    """The port of Serve's proxy on a Ray of 8 CPUs. Ray is imported here: its modules warn."""
    port = free_port()
    with short_folder() as folder, pytest.MonkeyPatch.context() as environment:
        environment.setenv("RAY_AUTH_MODE", "disabled")
        for name, value in serving_environment(Path(folder)).items():
            environment.setenv(name, value)
        import ray
        from ray import serve

        options: dict[str, Any] = {
            "address": "local",
            "include_dashboard": False,
            "num_cpus": 8,
            "object_store_memory": 100 << 20,
            "log_to_driver": False,
            "logging_level": "ERROR",
            "_node_ip_address": "127.0.0.1",
        }
        ray.init(**options)
        http = {"host": "127.0.0.1", "port": port, "keep_alive_timeout_s": KEEP_ALIVE_S}
        try:
            serve.start(http_options=http, logging_config={"log_level": "ERROR"})
            yield port
            serve.delete("mallee")
        finally:
            ray.shutdown()


def deploy(args: dict[str, Any], **more: Any) -> None:
    """Give the app of this process's Serve these settings, as `serve deploy` does."""
    from ray.serve.context import _get_global_client
    from ray.serve.schema import ServeDeploySchema

    app = {"name": "mallee", "route_prefix": "/", "import_path": "mallee.actors.app:app"}
    document = {"applications": [{**app, "args": args, **more}]}
    client: Any = _get_global_client()
    client.deploy_apps(ServeDeploySchema.model_validate(document))
