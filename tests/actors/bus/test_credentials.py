"""Files with credentials for an operator's broker, which is not asked."""

from pathlib import Path
from typing import Any

import pytest

from mallee.actors.bus.access import operators_broker
from mallee.actors.config import AppConfig
from mallee.protocol.errors import ConfigError


def config(**settings: Any) -> AppConfig:
    return AppConfig(model="m", fleet="f", nats_url="nats://127.0.0.1:1", **settings)


@pytest.mark.parametrize("text", [None, "", "one\ntwo", b"\xff\xfe"])
def test_a_file_without_credentials_is_one_error_that_does_not_show_it(
    tmp_path: Path, text: str | bytes | None
) -> None:
    file = tmp_path / "file"
    if text is not None:
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=f"nats_credentials='{file}': ") as caught:
        operators_broker(config(nats_credentials=str(file)), "worker")
    assert "two" not in str(caught.value)


def test_a_creds_file_needs_the_library_for_its_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "it.creds"
    file.write_text("-----BEGIN NATS USER JWT-----\nabc\n------END NATS USER JWT------\n")
    monkeypatch.setattr("mallee.actors.bus.access.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'nats-py\[nkeys\]'"):
        operators_broker(config(nats_credentials=str(file)), "gateway")
    monkeypatch.setattr("mallee.actors.bus.access.find_spec", lambda name: name)
    found = operators_broker(config(nats_credentials=str(file)), "gateway")
    assert found.options()["user_credentials"] == str(file)
