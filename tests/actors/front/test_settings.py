"""Settings of a picker, its command, and the manifest in the documentation."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from mallee.actors.front.config import FrontConfig
from mallee.actors.front.picker.config import PickerConfig
from mallee.actors.front.proxy.config import ProxyConfig
from mallee.cli.main import cli
from mallee.cli.serving.fronts import FrontOptions, make_front_config
from mallee.protocol.errors import ConfigError

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "picker.md").read_text()


def test_the_page_names_every_setting_with_its_default() -> None:
    shown = PAGE.partition("## Settings")[2].partition("## The proxy")[0]
    listed = set(re.findall(r"^    ([a-z_]+):", shown, re.MULTILINE))
    described = {name for name in PickerConfig.model_fields if f"`{name}`" in PAGE}
    assert PickerConfig.model_fields.keys() == listed | described
    for name in ("block_size", "kv_tokens", "max_rows", "fallbacks", "max_body_mb", "max_streams"):
        assert re.search(rf"^    {name}: {PickerConfig.model_fields[name].default} ", shown, re.M)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({}, "give one of endpoints, endpoints_file and pool"),
        ({"endpoints": ["a"], "pool": "b"}, "give one of endpoints"),
        ({"pool": "b", "events_port": 5557}, "events_port needs model"),
        ({"pool": "b", "replay_port": 5557}, "replay_port needs events_port"),
        ({"pool": "b", "tls_cert": "c"}, "give tls_cert and tls_key"),
        ({"pool": "b", "listen": "nowhere"}, "listen='nowhere': give host:port"),
        ({"pool": "b", "health_listen": "9003"}, "health_listen='9003': give host:port"),
        ({"pool": "b", "nats_credentials": "c"}, "nats_credentials needs nats_url"),
        ({"pool": "b", "nats_url": "nats://u:p@h"}, "nats_url holds credentials"),
        ({"pool": "b", "blocksize": 3}, "blocksize"),
        ({"pool": "b", "scrape_s": 0}, "scrape_s"),
    ],
)
def test_wrong_settings_are_refused_by_name(
    tmp_path: Path, values: dict[str, Any], said: str
) -> None:
    file = tmp_path / "picker.yaml"
    file.write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=re.escape(said)) as error:
        make_front_config(PickerConfig, "picker", FrontOptions(config=file), {})
    assert "u:p" not in str(error.value)


def test_the_routers_page_names_its_own_settings_with_their_defaults() -> None:
    """Those of a picker's page it does not repeat."""
    page = (ROOT / "docs" / "router.md").read_text()
    shown = page.partition("## Settings")[2].partition("## Moving over")[0]
    own = ProxyConfig.model_fields.keys() - FrontConfig.model_fields.keys()
    listed = set(re.findall(r"^    ([a-z_]+):", shown, re.MULTILINE))
    assert own | {"listen", "scrape_s", "endpoints", "fleet"} == listed
    for name in ("scrape_s", "max_requests", "head_s", "body_s", "silence_s", "retries", "listen"):
        default = ProxyConfig.model_fields[name].default
        assert re.search(rf"^    {name}: {re.escape(str(default))}(\s|$)", shown, re.M), name


def test_options_win_over_assignments_and_those_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "picker.yaml"
    file.write_text("{pool: one, fallbacks: 5, routing: {policy: cost}, scrape_s: 3}")
    assigned = ["pool=two", "routing.policy=random", "scrape_s=2"]
    front = FrontOptions(config=file, set_=assigned, pool="three", model="m")
    own = {"--endpoint": ("endpoints", None)}
    found = make_front_config(PickerConfig, "picker", front, own)
    assert (found.pool, found.fallbacks, found.scrape_s) == ("three", 5, 2)
    assert (found.model, found.endpoints) == ("m", ())
    assert found.routing.policy == "random"


def test_the_command_says_what_is_wrong_in_a_line() -> None:
    outcome = CliRunner().invoke(cli, ["picker", "--endpoint", "pod"])
    assert isinstance(outcome.exception, ConfigError)
    assert "give ip:port or host:port" in str(outcome.exception)
