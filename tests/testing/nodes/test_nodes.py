"""Services on this machine, `mallee up` among them: what they refuse before they start anything."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

from mallee.actors.local import RAY_STARTS, LocalStack
from mallee.cli.main import cli
from mallee.protocol.errors import ConfigError, MalleeError
from mallee.runtime.config import AppConfig
from mallee.testing.nodes import network
from mallee.testing.nodes.folders import Folder
from support.mock_scene import make_folder


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


@pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecatedSince20")  # Ray's
def test_a_ray_that_is_late_is_one_error_with_its_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray raises a bare exception then, and is started again; all others go on as they are, bare ones too."""
    late = Exception("The current node timed out during startup.")
    raised: list[Exception] = [
        *[late] * RAY_STARTS,
        late,
        Exception("Head node session dir not found in NodeInfo."),
        OSError("no file"),
        OSError("validate_socket_filename failed: AF_UNIX path length cannot exceed 107 bytes: /x"),
    ]

    def init(**options: Any) -> None:
        raise raised.pop(0)

    monkeypatch.setattr("ray.init", init)
    config = AppConfig.model_validate(
        {"model": str(make_folder(tmp_path)), "engine": {"kind": "mock"}}
    )
    with pytest.raises(ConfigError, match=r"Ray did not start, 3 times: .*timed out.*try again"):
        LocalStack(config, port=0).start()
    with pytest.raises(Exception, match="session dir") as found:
        LocalStack(config, port=0).start()
    assert type(found.value) is Exception
    with pytest.raises(OSError, match="no file"):
        LocalStack(config, port=0).start()
    with pytest.raises(ConfigError, match=r"AF_UNIX path length .*: /x; set TMPDIR .* to a short"):
        LocalStack(config, port=0).start()


def test_haproxys_sockets_have_short_paths_whatever_tmpdir_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Ray puts them below a node's id of 56 characters, and HAProxy binds a name of 12 more first."""
    (long := tmp_path / "scratch").mkdir()
    config = AppConfig.model_validate({"model": "m", "engine": {"kind": "mock"}})
    for folder in (str(long), "/tmp"):
        monkeypatch.setattr("tempfile.tempdir", folder)
        caplog.clear()
        with caplog.at_level("INFO", "mallee"):
            stack = LocalStack(config, port=0)
        assert caplog.messages == (
            [f"TMPDIR={long} is too long for HAProxy's sockets: they are in /tmp"]
            if folder == str(long)
            else []
        )
        assert len(f"{stack._folder}/{'n' * 56}/admin.sock.1234567.tmp") <= 107
        assert stack._folder.stat().st_mode & 0o777 == 0o700
        stack.close()
        assert not stack._folder.exists()


@pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecatedSince20")  # Ray's
def test_a_start_tells_what_it_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts that don't run yet, by the states of their replicas, for a log without a terminal too."""

    def state(status: str, **parts: dict[str, int]) -> Any:
        deployments = {
            name: SimpleNamespace(
                status="UPDATING" if "STARTING" in found or not found else "HEALTHY",
                replica_states=found,
                message="It failed 1 time:\nValueError: why\n" if "FAILED" in status + name else "",
            )
            for name, found in parts.items()
        }
        app = SimpleNamespace(status=status, message="no memory", deployments=deployments)
        return SimpleNamespace(applications={"mallee": app})

    states = [
        state("DEPLOYING", Worker={}, Gateway={"STARTING": 1}),
        state("DEPLOYING", Worker={"STARTING": 1, "RUNNING": 2}, Gateway={"RUNNING": 1}),
        state("DEPLOYING", FAILED={"STARTING": 1}),
        state("RUNNING"),
        state("DEPLOY_FAILED"),
    ]
    monkeypatch.setattr("ray.serve.status", lambda: states.pop(0))
    monkeypatch.setattr("mallee.actors.local.TELL_S", 0.0)
    monkeypatch.setattr("mallee.actors.local.LOOK_S", 0.0)
    told = list[str]()
    config = AppConfig.model_validate({"model": "m", "engine": {"kind": "mock"}})
    stack = LocalStack(config, port=0, tell=told.append)
    stack._wait_until_running()
    assert [sentence.partition(", 0 s")[0] for sentence in told] == [
        "waiting for Worker, Gateway (1 starting)",
        "waiting for Worker (1 starting) (2 running)",
        "waiting for FAILED (1 starting) ValueError: why",
    ]
    with pytest.raises(RuntimeError, match="no memory"):
        stack._wait_until_running()
    stack.close()
