"""`--json` and examples of all commands, and the objects that commands print."""

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from mallee import __version__
from mallee.actors.access.keys import digest
from mallee.actors.config import AppConfig, sections
from mallee.actors.telemetry.boards.files import files
from mallee.actors.telemetry.catalog import FAMILIES
from mallee.cli.main import cli
from mallee.testing.random_model import random_model

WITHOUT_JSON = {
    "serve": "serves until it is interrupted",
    "up": "serves until it is interrupted",
    "mock": "serves until it is interrupted",
    "picker": "serves until it is interrupted",
    "chat": "is a conversation",
}


def commands_of(group: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands_of(command, (*words, name))
        else:
            yield (*words, name)


COMMANDS = list(commands_of(typer.main.get_command(cli)))


def command_of(words: tuple[str, ...]) -> Any:
    command: Any = typer.main.get_command(cli)
    for word in words:
        command = command.commands[word]
    return command


def options_of(words: tuple[str, ...]) -> set[str]:
    return {
        name for param in command_of(words).params for name in param.opts + param.secondary_opts
    }


def printed(*arguments: str, status: int = 0) -> Any:
    """The object in the last line of stdout."""
    answer = CliRunner().invoke(cli, [*arguments, "--json"])
    assert answer.exit_code == status, (answer.output, answer.exception)
    return json.loads(answer.stdout.splitlines()[-1])


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_what_prints_and_ends_has_json(words: tuple[str, ...]) -> None:
    assert ("--json" in options_of(words)) == (" ".join(words) not in WITHOUT_JSON)


def test_the_exceptions_are_commands() -> None:
    assert set(WITHOUT_JSON) <= {" ".join(words) for words in COMMANDS}


@pytest.mark.slow
@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_help_has_an_example_that_the_program_understands(words: tuple[str, ...]) -> None:
    text = CliRunner().invoke(cli, [*words, "--help"], env={"COLUMNS": "200"}).stdout
    found = re.findall(rf"Example: mallee {' '.join(words)}([^│\n]*)", text)
    assert found
    for example in found:
        given = {word for word in shlex.split(example) if word.startswith("--")}
        assert given <= options_of(words) | {"--help"}


def test_the_version_is_an_object() -> None:
    assert printed("version") == {"version": __version__}


def test_settings_are_objects_by_their_dotted_keys() -> None:
    rows = {each["key"]: each for each in printed("settings")["settings"]}
    names = {f"{name}.{field}" for name, each in sections().items() for field in each.model_fields}
    names |= AppConfig.model_fields.keys() - sections().keys()
    assert rows.keys() == names
    assert rows["model"]["required"]
    assert rows["routing.policy"]["schema"]["default"] == "cost"
    told = printed("settings", "--nats-permissions", "f")
    assert told["fleet"] == "f"
    assert "$GATEWAYS_PASSWORD" in told["authorization"]


def test_metric_families_and_the_files_made_of_them_are_objects(tmp_path: Path) -> None:
    told = printed("metrics")["families"]
    assert [each["name"] for each in told] == [family.name for family in FAMILIES]
    assert told[0]["labels"][0] == {"name": "endpoint", "values": [], "most": 48}
    written = printed("metrics", "--write", str(tmp_path))["files"]
    assert {Path(path) for path in written} == {tmp_path / name for name in files()}


def test_a_key_and_its_entry_are_one_object(tmp_path: Path) -> None:
    told = printed("keys", "new", "alice", "--tenant", "acme")
    assert told["entry"]["sha256"] == digest(told["key"])
    assert told["entry"]["tenant"] == "acme"
    file = tmp_path / "keys.yaml"
    file.write_text(json.dumps({"keys": [told["entry"]]}))
    assert printed("keys", "check", str(file)) == {
        "file": str(file), "right": True, "keys": ["alice"]
    }  # fmt: skip
    file.write_text("keys: [{name: a}]")
    told = printed("keys", "check", str(file), status=1)
    assert not told["right"]
    assert "sha256" in told["faults"][0]


def test_faults_of_settings_are_an_object(tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text("model: m\nengine: {kind: mock}\n")
    told = printed("check", str(file))
    assert (told["file"], told["right"], told["faults"]) == (str(file), True, [])
    file.write_text("model: m\nworkers: 0\n")
    told = printed("check", str(file), status=1)
    assert not told["right"]
    assert told["faults"] == ["workers=0: Input should be greater than or equal to 1"]
    assert told["notes"] == []


def test_a_model_that_was_compared_is_an_object(tmp_path: Path, one_thread: None) -> None:
    random_model("gemma3_text", 4).save(tmp_path)
    told = printed("doctor-model", str(tmp_path), "--tokens", "2")
    assert told["agrees"]
    assert told["first_difference"] is None
    assert (told["dtype"], told["steps"]) == ("float32", 2)
    assert {"embed", "logits"} <= {each["site"] for each in told["sites"]}


def test_profiles_that_come_with_mallee_are_an_object() -> None:
    told = printed("profile", "--fits")
    assert "h200-llama-3.1-8b-fp8" in told["profiles"]
    assert told["credits"]
