"""The address that Serve listens on, as builders and replicas see it, in a Ray of their own process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mallee.runtime.addresses import free_port
from mallee.runtime.proxy.choice import SWITCH, haproxy_binary, serving_environment
from support.folders import short_folder
from support.mock_scene import make_folder, mock_config

pytestmark = [pytest.mark.process, pytest.mark.ray, pytest.mark.slow]

APP = """
import asyncio
from ray import serve
from mallee.actors.cluster import http_host

@serve.deployment
class Replica:
    def __init__(self, of_builder):
        self.of_builder = of_builder

    async def __call__(self, request):
        return [self.of_builder, await asyncio.to_thread(http_host)]

def app(args):
    return Replica.bind(http_host())
"""

DRIVER = """
import json, os, sys
import httpx, ray
from ray import serve
from ray.serve.context import _get_global_client
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ServeDeploySchema
from mallee.actors.app import app as mallee
from mallee.actors.cluster import exposure, http_host
from mallee.runtime.config import AppConfig

def refusal(config):
    try:
        mallee(config)
    except RayServeException as error:
        return str(error)

host, port, config = sys.argv[1], int(sys.argv[2]), AppConfig.model_validate_json(sys.argv[3])
ray.init(address="local", include_dashboard=False, _node_ip_address="127.0.0.1", num_cpus=4,
         object_store_memory=100 << 20)
before = http_host()
assert exposure() is None
serve.start(http_options={"host": host, "port": port})
app = {"name": "it", "route_prefix": "/", "import_path": "hosts:app", "args": {}}
client = _get_global_client()
client.deploy_apps(ServeDeploySchema.model_validate({"applications": [app]}))
client._wait_for_application_running("it", timeout_s=60)
seen = None
while seen is None:
    answer = httpx.get(f"http://{host}:{port}/")
    seen = answer.json() if answer.status_code == 200 else None
without_key = refusal(config)
os.environ["MALLEE_API_KEY"] = "a-key-of-the-operator"
print(json.dumps({"hosts": [before, *seen], "refusals": [without_key, refusal(config)]}))
"""


# Each other than the default, which is every interface in HAProxy mode.
@pytest.mark.parametrize(("is_haproxy", "host"), [(False, "0.0.0.0"), (True, "127.0.0.1")])
def test_the_address_that_serve_listens_on_is_known_and_wants_a_key_if_others_reach_it(
    is_haproxy: bool, host: str, tmp_path: Path
) -> None:
    if is_haproxy and haproxy_binary() is None:
        pytest.skip("needs HAProxy")
    config = mock_config(make_folder(tmp_path)).model_dump_json()
    environment = {name: value for name, value in os.environ.items() if name != "MALLEE_API_KEY"}
    with short_folder() as folder:
        (Path(folder) / "hosts.py").write_text(APP)
        done = subprocess.run(
            [sys.executable, "-c", DRIVER, host, str(free_port()), config],
            env=environment
            | (serving_environment(Path(folder)) if is_haproxy else {SWITCH: "0"})
            | {
                "PYTHONPATH": folder,
                "RAY_AUTH_MODE": "disabled",
                "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # loopback alone
            },
            stdout=subprocess.PIPE,
            timeout=120,
            check=True,
        )
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["hosts"] == [None, host, host]
    without_key, with_key = found["refusals"]
    assert with_key is None
    if host == "0.0.0.0":
        assert without_key.startswith(f"{host} listens beyond this machine, and no API key is set")
    else:
        assert without_key is None
