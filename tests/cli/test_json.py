"""`--json` and examples of all commands; keys, metrics and the objects that commands print."""

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from mallee.cli import settings
from mallee.cli.main import cli
from mallee.cli.metrics import declared, document
from mallee.gateway.access.access import Access
from mallee.gateway.access.keys import digest, read_file
from mallee.protocol.errors import ConfigError
from mallee.runtime.config import AppConfig, sections

ROOT = Path(__file__).resolve().parents[2]
WITHOUT_JSON = {
    "serve": "serves until it is interrupted",
    "up": "serves until it is interrupted",
    "mock": "serves until it is interrupted",
    "picker": "serves until it is interrupted",
    "router": "serves until it is interrupted",
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


def test_settings_are_a_page_and_objects_by_their_dotted_keys() -> None:
    page = (ROOT / "docs" / "configure.md").read_text(encoding="utf-8")
    assert CliRunner().invoke(cli, ["settings"]).stdout == page == settings.document()
    rows = {each["key"]: each for each in printed("settings")["settings"]}
    names = {f"{name}.{field}" for name, each in sections().items() for field in each.model_fields}
    names |= AppConfig.model_fields.keys() - sections().keys()
    assert rows.keys() == names
    assert rows["model"]["required"]
    assert rows["routing.policy"]["schema"]["default"] == "cost"
    told = printed("settings", "--nats-permissions", "f")
    assert told["fleet"] == "f"
    assert "$GATEWAYS_PASSWORD" in told["authorization"]


def test_metric_families_are_a_page_and_objects() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert CliRunner().invoke(cli, ["metrics"]).stdout == page == document()
    told = printed("metrics")["families"]
    assert [each["name"] for each in told] == [x for found in declared().values() for x in found]
    assert told[0]["labels"][0] == {"name": "version", "values": [], "most": 1}
    assert all(f"| `{each['name']}` |" in page for each in told)


def test_a_new_key_opens_the_service_that_has_its_entry(tmp_path: Path) -> None:
    made = CliRunner().invoke(cli, ["keys", "new", "alice", "--tenant", "acme"])
    token, file = made.stderr.strip(), tmp_path / "keys.yaml"
    assert token not in made.stdout, "the file must not hold the key"
    file.write_text("keys:\n" + made.stdout)
    checked = CliRunner().invoke(cli, ["keys", "check", str(file)])
    assert checked.stdout == f"{file}: right, 1 keys\n"
    assert Access(file, {}).caller(token, None).tenant == "acme"
    told = printed("keys", "new", "alice", "--tenant", "acme")
    assert told["entry"]["sha256"] == digest(told["key"])
    assert told["entry"]["tenant"] == "acme"
    assert printed("keys", "check", str(file)) == {
        "file": str(file), "right": True, "keys": ["alice"]
    }  # fmt: skip


def test_a_new_key_goes_into_its_file_with_its_limits(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    limits = {
        "expires": "2130-01-01T00:00:00Z",
        "weight": 2.0,
        **dict.fromkeys(("requests_per_minute", "tokens_per_minute", "max_running"), 3),
        **dict.fromkeys(("max_branches", "max_capsules", "max_capsule_tokens"), 4),
    }
    options = [
        word
        for name, value in limits.items()
        for word in (f"--{name.replace('_', '-')}", str(value))
    ]
    for name in ("alice", "bob"):
        told = printed("keys", "new", name, "--into", str(file), *options)
        assert told["entry"] == {**told["entry"], **limits}
    alice, bob = read_file(file)
    assert bob.sha256 == digest(told["key"])
    assert alice.model_dump(mode="json", include=set(limits)) == limits
    answer = CliRunner().invoke(
        cli, ["keys", "new", "c", "--into", str(file), "--expires", "2130-01-01"]
    )
    assert "expires needs a time zone" in str(answer.exception)
    assert len(read_file(file)) == 2


def test_faults_of_names_roles_and_files_of_keys_are_named(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text("keys: [{name: a}]")
    told = printed("keys", "check", str(file), status=1)
    assert not told["right"]
    assert "sha256" in told["faults"][0]
    for arguments, fault in (
        (["new", "a b"], "name"),
        (["new", "a", "--role", "boss"], "boss"),
        (["check", str(file)], "sha256"),
        (["check", str(tmp_path / "none")], "No such file"),
    ):
        answer = CliRunner().invoke(cli, ["keys", *arguments])
        assert isinstance(answer.exception, ConfigError)
        assert fault in str(answer.exception)


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
