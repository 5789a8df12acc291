"""A deploy that other machines could reach without a key is refused."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mallee.actors.addresses import free_port
from support.mock_scene import make_folder, mock_config

pytestmark = [pytest.mark.process, pytest.mark.ray, pytest.mark.slow]

_BUILD = """
import os, sys, ray
from ray import serve
from ray.serve.exceptions import RayServeException
from mallee.actors.app import app
from mallee.actors.config import AppConfig

ray.init(address="local", include_dashboard=False, _node_ip_address="127.0.0.1", log_to_driver=False)
serve.start(http_options={"host": "0.0.0.0", "port": int(sys.argv[2])})
config = AppConfig.model_validate_json(sys.argv[1])
try:
    app(config)
    print("built")
except RayServeException as error:
    print("refused:", error)
os.environ["MALLEE_API_KEY"] = "a-key-of-the-operator"
app(config)
print("built with a key")
"""


def test_serve_on_all_interfaces_wants_a_key(tmp_path: Path) -> None:
    config = mock_config(make_folder(tmp_path))
    environment = {k: v for k, v in os.environ.items() if k != "MALLEE_API_KEY"}
    done = subprocess.run(
        [sys.executable, "-c", _BUILD, config.model_dump_json(), str(free_port())],
        env={**environment, "RAY_AUTH_MODE": "disabled", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    refused, built = [line for line in done.stdout.splitlines() if line[:5] in ("refus", "built")]
    assert refused.startswith("refused: 0.0.0.0 listens beyond this machine, and no API key is set")
    assert built == "built with a key"
