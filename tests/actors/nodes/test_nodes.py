"""Parts of `mallee up`: what it refuses before it starts anything."""

from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from mallee.actors.nodes import network
from mallee.actors.nodes.folders import Folder
from mallee.cli.main import cli
from mallee.protocol.errors import ConfigError, MalleeError


def test_a_folder_too_deep_for_sockets_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(ConfigError, match="set TMPDIR="):
        Folder()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "cause"),
    [
        (["--set", "nats_url=nats://host"], "leave it out"),
        (["--gateways", "13"], "3 nodes have 12 at most"),
        (["--model", "/nowhere/model"], "'/nowhere/model' is neither a directory"),
        (["--host", "0.0.0.0"], "MALLEE_API_KEY"),
    ],
)
def test_settings_that_nodes_cant_serve_are_refused_before_anything_starts(
    arguments: list[str], cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MALLEE_API_KEY", raising=False)
    before = len(psutil.Process().children(recursive=True))
    answer = CliRunner().invoke(cli, ["up", *arguments])
    assert isinstance(answer.exception, MalleeError)
    assert cause in str(answer.exception)
    assert len(psutil.Process().children(recursive=True)) == before


def test_where_namespaces_cant_be_had_the_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert network.obstacle() == "unshare, ip, mount not installed (packages iproute2, util-linux)"
