"""`mallee check`: every fault of a serve.yaml in a line of its own, before anything is deployed."""

import json
import socket
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from typer.testing import CliRunner

from bench.doubles.quantized import quantization_config
from bench.doubles.random_model import random_model
from mallee.cli.main import cli
from mallee.protocol.errors import ConfigError
from mallee.runtime.proxy.direct import ENVIRONMENT
from support.mock_scene import make_folder

ROOT = Path(__file__).parents[2]
APP = "mallee.actors.app:app"

# Ray's own, at its import.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


class Answer(NamedTuple):
    status: int
    faults: list[str]
    output: str


@pytest.fixture
def check(tmp_path: Path) -> Any:
    """Calls `mallee check` on a file with that content; faults come without the file's name."""

    def call(content: Any, *options: str) -> Answer:
        path = tmp_path / "serve.yaml"
        path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
        answer = CliRunner().invoke(cli, ["check", str(path), *options])
        assert answer.exception is None or isinstance(answer.exception, SystemExit), repr(
            answer.exception
        )
        faults = [line.removeprefix(f"{path}: ") for line in answer.stderr.splitlines()]
        return Answer(answer.exit_code, faults, answer.stdout)

    return call


def serve_yaml(
    *, args: dict[str, Any] | None = None, deployments: list[Any] | None = None, **options: Any
) -> dict[str, Any]:
    return {
        "http_options": {"host": "127.0.0.1"},
        "applications": [
            {
                "name": "llm",
                "import_path": APP,
                "args": {"model": "m", **(args or {})},
                "deployments": deployments or [],
                **options,
            }
        ],
    }


def test_serve_yaml_is_right() -> None:
    answer = CliRunner().invoke(cli, ["check", str(ROOT / "serve.yaml")])
    assert (answer.exit_code, answer.stderr) == (0, "")


def test_every_fault_of_an_application_is_named_in_a_line_each(check: Any) -> None:
    answer = check(
        "applications:\n"
        "- {name: other, import_path: elsewhere:app, args: {x: 1}, route_prefix: /other}\n"
        "- {name: llm, import_path: mallee.actors.app:app,\n"
        "   args: {model: m, workers: 0, engine: {kind: sglang}}}\n"
    )
    assert (answer.status, answer.faults) == (
        1,
        [
            "llm: workers=0: Input should be greater than or equal to 1",
            "llm: engine.kind='sglang': Input should be 'model', 'mock' or 'vllm'",
        ],
    )


def test_options_that_keep_what_mallee_needs_are_right(check: Any) -> None:
    actor = {"num_cpus": 1, "runtime_env": {"env_vars": {**ENVIRONMENT, "X": "1"}}}
    gateway = {"name": "Gateway", "num_replicas": 2, "ray_actor_options": actor}
    worker = {"name": "Worker", "num_replicas": 8, "ray_actor_options": {"num_gpus": 1}}
    answer = check(serve_yaml(args={"engine": {"device": "cuda"}}, deployments=[gateway, worker]))
    assert (answer.status, answer.faults) == (0, [])


def test_settings_and_deployments_must_not_contradict_each_other(check: Any) -> None:
    worker = {"name": "Worker", "num_replicas": 2, "ray_actor_options": {"num_cpus": 1}}
    answer = check(
        serve_yaml(
            args={
                "nats_url": "nats://nats:4222",
                "engine": {"device": "cuda"},
                "autoscaling": {"max_workers": 4},
            },
            deployments=[worker, {"name": "Broker"}],
        )
    )
    assert answer.faults == [
        "llm: Worker: num_replicas=2 beside autoscaling.max_workers: leave one of them out",
        "llm: Worker: ray_actor_options without num_gpus take the place of Mallee's, and engine.device is"
        " 'cuda': add num_gpus: 1",
        "llm: deployment `Broker`: with nats_url there is none",
    ]


DEPLOYMENTS = [
    (
        [{"name": "Workers"}],
        "deployment `Workers` is none of Mallee's; the nearest is `Worker`",
    ),
    ([{"name": "Worker", "user_config": {}}], "Worker: user_config: no deployment of Mallee"),
    ([{"name": "Worker", "num_replicas": "auto"}], "Worker: num_replicas: give autoscaling."),
    ([{"name": "Gateway", "num_replicas": "auto"}], "Gateway: num_replicas: give a number"),
    (
        [{"name": "Worker", "autoscaling_config": {"max_replicas": 3}}],
        "Worker: autoscaling_config: give autoscaling.max_workers",
    ),
    (
        [{"name": "Gateway", "max_ongoing_requests": 5}],
        "Gateway: max_ongoing_requests=5 < http.max_connections=4096: Ray Serve would hold",
    ),
    ([{"name": "Broker", "num_replicas": 3}], "Broker: num_replicas=3: a fleet has one broker"),
    (
        [{"name": "Gateway", "ray_actor_options": {"num_cpus": 1}}],
        "Gateway: ray_actor_options take the place of Mallee's, without which",
    ),
    (
        [{"name": "Gateway", "max_surge_percents": 2}],
        "`applications.llm.deployments.Gateway.max_surge_percents` is no option of Ray Serve; the"
        " nearest is `max_surge_percent`",
    ),
    (
        [{"name": "Worker", "ray_actor_options": {"num_gpu": 1}}],
        "`applications.llm.deployments.Worker.ray_actor_options.num_gpu` is no option",
    ),
    (
        [{"name": "Gateway", "num_replicas": -1}],
        "applications.llm.deployments.Gateway.num_replicas",
    ),
]


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        *((serve_yaml(deployments=given), fault) for given, fault in DEPLOYMENTS),
        ({"http_options": {}}, "`applications` is missing"),
        ({"import_path": APP, "args": {}}, "`applications` is missing"),
        (serve_yaml(import_path="mallee.actors.app"), "give mallee.actors.app:app"),
        (serve_yaml(import_path="mallee.app:app"), "import_path='mallee.app:app': give mallee.act"),
        (
            serve_yaml(import_path="my.service:app"),
            "no application has import_path: mallee.actors.app:app; there are my.service:app",
        ),
        (serve_yaml(import_path=3), "applications.llm.import_path=3"),
        ({**serve_yaml(), "http": {}}, "`http` is no option of Ray Serve"),
        ({**serve_yaml(), "http_options": {"port": "x"}}, "http_options.port='x'"),
        ({**serve_yaml(), "applications": None}, "applications"),
        (
            serve_yaml(route_prefx="/"),
            "`applications.llm.route_prefx` is no option of Ray Serve; the",
        ),
        (
            serve_yaml(runtime_env={"env_vars": {"MALLEE_API_KEY": "s3cret"}}),
            "llm: runtime_env: Ray Serve shows and logs MALLEE_API_KEY: give http.keys_file",
        ),
    ],
)
def test_a_serve_yaml_that_serve_or_a_replica_would_refuse_or_misread_is_a_fault(
    check: Any, content: Any, fault: str
) -> None:
    answer = check(content)
    assert answer.status == 1
    assert any(fault in each for each in answer.faults), answer.faults
    assert "s3cret" not in " ".join(answer.faults)


def test_two_applications_must_not_take_each_others_workers(check: Any) -> None:
    content = serve_yaml(args={"nats_url": "nats://nats:4222"})
    content["applications"].append(
        {**content["applications"][0], "name": "b", "route_prefix": "/b"}
    )
    assert check(content).faults == ["b: fleet='default' at one broker is llm's too"]
    content["applications"][1]["args"] = {**content["applications"][0]["args"], "fleet": "b"}
    assert check(content).status == 0


def test_what_the_file_cannot_tell_is_a_note(check: Any) -> None:
    content = serve_yaml(args={"model": "org/some-model"})
    del content["http_options"]  # Serve then listens everywhere
    answer = check(content, "--files")
    assert answer.status == 0
    assert "note: llm: http_options.host='0.0.0.0' listens beyond this machine" in answer.output
    assert "note: llm: model='org/some-model' is no folder here" in answer.output
    sized = "each worker sizes KV by the memory that its GPU has free"
    assert sized not in answer.output
    for engine, is_sized in (({"device": "cuda"}, True), ({"device": "cuda", "kv_gib": 8}, False)):
        content["applications"][0]["args"]["engine"] = engine
        assert (sized in check(content).output) == is_sized


@pytest.mark.parametrize(
    ("more", "is_noted"),
    [
        ({}, True),
        ({"links": {"secret_file": "/s"}}, False),
        ({"engine": {"disk_path": "/d", "disk_gib": 1}}, False),
        ({"nats_url": None}, False),
    ],
)
def test_a_store_that_outlives_its_secret_is_noted(
    check: Any, more: dict[str, Any], is_noted: bool
) -> None:
    """X28, part: ids of what lies in a NATS of one's own are unknown to the next Ray."""
    args = {"nats_url": "nats://a:4222", **more}
    told = check(serve_yaml(args=args))
    assert told.status == 0
    assert ("nats_url without links.secret_file" in told.output) == is_noted


def test_a_file_of_settings_needs_no_model_as_serve_has_a_default(check: Any) -> None:
    assert check({"workers": 2}).status == 0
    assert check({"workers": 2, "model": ""}).status == 1
    content = serve_yaml()
    del content["applications"][0]["args"]["model"]
    assert check(content).status == 1, "Ray Serve has none"


def test_a_manifest_of_kuberay_is_checked_by_its_serve_config(check: Any) -> None:
    text = yaml.safe_dump(serve_yaml(deployments=[{"name": "Workers"}]))
    manifest = {"kind": "RayService", "spec": {"serveConfigV2": text}}
    assert check(manifest).faults == [
        "llm: deployment `Workers` is none of Mallee's; the nearest is `Worker`"
    ]
    assert check({"kind": "RayService", "spec": {}}).status == 1


def test_files_that_are_missing_are_named_where_that_is_asked_for(
    check: Any, tmp_path: Path
) -> None:
    file = tmp_path / "a-file"
    file.write_text("x")
    args = {
        "model": "/nowhere/model",
        "http": {"keys_file": "/nowhere/keys"},
        "links": {"secret_file": "/nowhere/secret"},
        "nats_url": "nats://nats:4222",
        "nats_credentials": "/nowhere/nats",
        "nats_ca": "/nowhere/ca.pem",
        "engine": {"disk_path": str(file / "kv")},
        "recording": {"folder": str(file)},
    }
    assert check(serve_yaml(args=args)).status == 0
    faults = check(serve_yaml(args=args), "--files").faults
    named = ("/nowhere/model", "keys", "secret", "nats_credentials", "engine.disk_path=", "record")
    for part in named:
        assert sum(part in fault for fault in faults) == 1, (part, faults)
    (model := tmp_path / "model").mkdir()
    args = {"model": str(make_folder(model)), "engine": {"kind": "mock"}}
    assert check(serve_yaml(args=args), "--files").status == 0
    wrong = {**args, "mock": {"timing": "h2000"}}
    (fault,) = check(wrong, "--files").faults
    assert "timing='h2000' is no file" in fault
    args = {**args, "recording": {"folder": "/proc/records"}}  # a folder that root, too, can't fill
    (fault,) = check(serve_yaml(args=args), "--files").faults
    assert "recording.folder='/proc/records': /proc can't be written by this user (No such" in fault


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"engine": {"kv_gib": 900}},
            "2 workers ask for 1800 GiB for KV (engine.kv_gib and host_gib)",
        ),
        ({"engine": {"kv_gib": 1, "host_gib": 9000}}, "2 workers ask for 18002 GiB for KV"),
        ({"ray": {"worker_cpus": 512}}, "2 workers ask for 1024 CPUs (ray.worker_cpus)"),
        ({"ray": {"worker_gpus": 64}, "engine": {"device": "cuda"}}, "2 workers ask for 128 GPUs"),
        (
            {
                "engine": {"kv_gib": 900},
                "nats_url": "nats://a:4222",
                "links": {"secret_file": "/s"},
            },
            "1 workers ask for 900 GiB",  # others may have nodes of their own
        ),
    ],
)
def test_more_than_this_machine_has_is_a_note_and_on_a_node_a_fault(
    check: Any, tmp_path: Path, settings: dict[str, Any], sentence: str
) -> None:
    (model := tmp_path / "model").mkdir()
    content = {"model": str(make_folder(model)), "workers": 2, **settings}
    answer = check(content)
    assert answer.status == 0
    assert f"note: {sentence}" in answer.output
    assert "this machine has" in answer.output
    answer = check(content, "--files")
    assert sum(fault.startswith(sentence) for fault in answer.faults) == 1
    (folder := tmp_path / "small").mkdir()
    small = {"engine": {"kv_gib": 0.01}, "store": {"folder": str(folder)}}
    assert "this machine has" not in check({"model": str(model), "workers": 1, **small}).output


@pytest.mark.parametrize(
    ("wrong", "sentences"),
    [
        (
            {"recording": {"folder": "/proc/a"}, "imports": {"folder": "/proc/b"}},
            ["recording.folder='/proc/a': /proc can't be written", "; imports.folder='/proc/b'"],
        ),
        ({"ray": {"worker_cpus": 512}}, ["1 workers ask for 512 CPUs (ray.worker_cpus)"]),
    ],
)
def test_serve_refuses_before_ray_what_check_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: dict[str, Any], sentences: list[str]
) -> None:
    monkeypatch.setattr("ray.init", lambda **options: pytest.fail("Ray is started"))
    content = {"model": str(make_folder(tmp_path)), "engine": {"kind": "mock"}, **wrong}
    (settings := tmp_path / "settings.yaml").write_text(yaml.safe_dump(content))
    answer = CliRunner().invoke(cli, ["serve", "--config", str(settings)])
    assert isinstance(answer.exception, ConfigError)
    for sentence in sentences:
        assert sentence in str(answer.exception)


def test_options_that_the_running_serve_keeps_are_faults(
    check: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """P5 of a user's day: `serve deploy` takes another host without a word, and listens where it did."""
    running: dict[str, Any] = {"proxy_location": "EveryNode", "http_options": None}
    asked = list[str]()

    class Client:
        def __init__(self, address: str) -> None:
            asked.append(address)
            if address.endswith(":1"):
                raise ConnectionError(
                    f"Failed to connect to Ray at address: {address}.\nSecond line"
                )

        def get_serve_details(self) -> dict[str, Any]:
            return running

    monkeypatch.setattr("ray.dashboard.modules.serve.sdk.ServeSubmissionClient", Client)
    monkeypatch.setenv("RAY_DASHBOARD_ADDRESS", "http://127.0.0.1:18265")
    content = {**serve_yaml(), "proxy_location": "EveryNode"}
    assert check(content, "--running").status == 0, "no Serve runs: it takes what it is given"
    running["http_options"] = {"host": "127.0.0.1", "port": 8000, "root_path": ""}
    assert check(content, "--running").status == 0
    running["http_options"] |= {"host": "0.0.0.0", "port": 8001}
    faults = check(content, "--running").faults
    rest = " until `serve shutdown -y`, which ends all requests; then deploy again"
    assert faults == [
        f"http_options.host='127.0.0.1' would be ignored: the Serve that runs has '0.0.0.0'{rest}",
        f"http_options.port=8000 would be ignored: the Serve that runs has 8001{rest}",
    ]
    (fault,) = check(
        {
            **serve_yaml(),
            "proxy_location": "HeadOnly",
            "http_options": {"host": "0.0.0.0", "port": 8001},
        },
        "--running",
    ).faults
    assert fault.startswith("proxy_location='HeadOnly' would be ignored")
    assert set(asked) == {"http://127.0.0.1:18265"}
    (settings := tmp_path / "settings.yaml").write_text("workers: 2")
    answer = CliRunner().invoke(cli, ["check", str(settings), "--running"])
    assert isinstance(answer.exception, ConfigError)
    assert "--running compares a serve.yaml" in str(answer.exception)
    monkeypatch.setenv("RAY_DASHBOARD_ADDRESS", "http://127.0.0.1:1")
    answer = CliRunner().invoke(cli, ["check", str(ROOT / "serve.yaml"), "--running"])
    assert isinstance(answer.exception, ConfigError)
    assert "at RAY_DASHBOARD_ADDRESS=http://127.0.0.1:1 (Failed to connect" in str(answer.exception)
    assert "Second line" not in str(answer.exception)


def test_a_dashboard_that_does_not_answer_is_not_waited_for_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("mallee.cli.check.DASHBOARD_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setenv("RAY_DASHBOARD_ADDRESS", address)
        answer = CliRunner().invoke(cli, ["check", str(ROOT / "serve.yaml"), "--running"])
    assert isinstance(answer.exception, ConfigError)
    assert f"RAY_DASHBOARD_ADDRESS={address} (" in str(answer.exception)
    assert "timed out" in str(answer.exception)


def test_weights_in_a_form_that_is_not_computed_are_a_fault_before_a_deploy(
    check: Any, tmp_path: Path
) -> None:
    """I14, part, D39: by config.json alone, without the weights."""
    raw = {**random_model("llama").raw, "quantization_config": quantization_config("fp8-row")}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    args = {"model": str(tmp_path)}
    assert check(serve_yaml(args=args), "--files").status == 0
    raw["quantization_config"] = {"quant_method": "mxfp4"}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    (fault,) = check(serve_yaml(args=args), "--files").faults
    assert "quant_method is 'mxfp4'; supported:" in fault
    assert "planned" in fault


@pytest.mark.parametrize(
    "options", ["--picker --router", "--picker --files", "--router --broker", "--picker --running"]
)
def test_options_that_would_look_at_nothing_are_refused(options: str) -> None:
    answer = CliRunner().invoke(cli, ["check", str(ROOT / "serve.yaml"), *options.split()])
    assert isinstance(answer.exception, ConfigError)
    assert "--files, --broker and --running" in str(answer.exception)
