"""Settings from files, `--set` and options; the page that lists them."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mallee.cli.main import cli
from mallee.cli.settings import make_config
from mallee.protocol.errors import ConfigError


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "fleet.yaml"
    path.write_text("model: a\nworkers: 2\nrouting: {policy: dynamo, temperature: 0.5}\n")
    return path


def test_options_win_over_set_and_set_over_the_file(file: Path) -> None:
    config = make_config(
        file,
        ["workers=3", "routing.temperature=0.25", "http.max_branches=7"],
        {"--workers": ("workers", 4), "--model": ("model", None)},
        base={"routing.max_index_mb": 1, "routing.temperature": 1.0},
    )
    assert (config.model, config.workers) == ("a", 4)
    assert config.routing.policy == "dynamo"
    assert config.routing.temperature == 0.25
    assert config.routing.max_index_mb == 1
    assert config.http.max_branches == 7


def test_values_of_set_are_yaml() -> None:
    """Without a file the model is the small one."""
    config = make_config(
        None,
        [
            "served_model_name=null",
            "routing.kv_events=false",
            "routing.cost={prefill_token_s: 2.2e-5}",
            "admission.tenant_weights.acme=2",
            "experimental.debug_logs=[steps]",
        ],
        {},
    )
    assert config.model == "smollm2"
    assert config.served_model_name is None
    assert config.routing.kv_events is False
    assert config.routing.cost == {"prefill_token_s": 2.2e-5}
    assert config.admission.tenant_weights == {"acme": 2.0}
    assert config.experimental.debug_logs == {"steps"}


@pytest.mark.parametrize(
    ("assignment", "says"),
    [
        ("workers", "--set workers: give KEY=VALUE"),
        ("=3", "--set =3: give KEY=VALUE"),
        ("model=[", r"--set model=\[: '\[' is no YAML value"),
        ("model.name=3", "model.name: model has a value of its own"),
        ("policy=cost", "`policy` is no setting; the nearest is `routing.policy`"),
        ("routing.polcy=cost", "`routing.polcy` is no setting; the nearest is `routing.policy`"),
        ("workers=0", "workers=0: Input should be greater than or equal to 1"),
    ],
)
def test_what_set_can_not_mean_is_refused(assignment: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make_config(None, [assignment], {})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("- a\n", "give settings as"),
        ("a: [\n", "no YAML"),
        (None, "can't be read"),
        (
            "model: a\nhttp: {max_branches: 1,\n  max_branches: 2}\n",
            "line 3: `max_branches` is given",
        ),
    ],
)
def test_a_file_without_settings_is_refused(tmp_path: Path, text: str | None, says: str) -> None:
    path = tmp_path / "x.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=f"x.yaml: .*{says}"):
        make_config(path, None, {})


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--processes", "3"], "--engines 16 can't be shared evenly by --processes 3"),
        (["--engines", "8", "--set", "workers=2"], "--engines 8, .* workers=2: .*--processes 2"),
    ],
)
def test_engines_that_processes_cannot_share_are_refused(arguments: list[str], says: str) -> None:
    result = CliRunner().invoke(cli, ["mock", *arguments])
    assert isinstance(result.exception, ConfigError)
    assert re.search(says, str(result.exception))
