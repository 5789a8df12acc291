"""`mallee keys`."""

from pathlib import Path

from typer.testing import CliRunner

from mallee.actors.access.access import Access
from mallee.cli.main import cli
from mallee.protocol.errors import ConfigError


def test_a_new_key_opens_the_service_that_has_its_entry(tmp_path: Path) -> None:
    made = CliRunner().invoke(cli, ["keys", "new", "alice", "--tenant", "acme"])
    token, file = made.stderr.strip(), tmp_path / "keys.yaml"
    assert token not in made.stdout, "the file must not hold the key"
    file.write_text("keys:\n" + made.stdout)
    checked = CliRunner().invoke(cli, ["keys", "check", str(file)])
    assert checked.stdout == f"{file}: right, 1 keys\n"
    assert Access(file, {}).caller(token, None).tenant == "acme"


def test_faults_of_names_roles_and_files_are_named(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text("keys: [{name: a}]")
    for arguments, fault in (
        (["new", "a b"], "name"),
        (["new", "a", "--role", "boss"], "boss"),
        (["check", str(file)], "sha256"),
        (["check", str(tmp_path / "none")], "No such file"),
    ):
        answer = CliRunner().invoke(cli, ["keys", *arguments])
        assert isinstance(answer.exception, ConfigError)
        assert fault in str(answer.exception)
