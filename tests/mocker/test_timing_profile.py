"""`mallee profile`: a file from a real engine, and what is wrong in one line."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from mallee.cli.main import cli
from mallee.mocker.timing import load_timing
from mallee.mocker.timing.files import GridData, read_timing
from mallee.protocol.errors import ConfigError


def test_a_real_engine_becomes_a_file_that_loads(tmp_path: Path) -> None:
    """K20: the writer produces the file from a real run."""
    pytest.importorskip("torch")
    from mallee.testing.random_model import random_model

    random_model("llama", 4).save(tmp_path / "model")
    out = tmp_path / "tiny.json"
    sizes = ["--max-rows", "3", "--max-context", "64", "--max-step-tokens", "32"]
    arguments = ["profile", str(tmp_path / "model"), "--to", str(out), "--dtype", "float32"]
    answer = CliRunner().invoke(cli, [*arguments, "--threads", "1", "--kv-tokens", "2048", *sizes])
    assert answer.exit_code == 0, answer.output
    found = read_timing(out)
    assert isinstance(found.model, GridData)
    assert found.model.prefill.new == (16, 32)
    assert found.model.decode.rows == (1, 2, 3)
    assert found.conditions["dtype"] == "float32"
    assert found.kv_bytes_per_token > 0
    timing = load_timing(str(out))
    assert 0 < timing.step_s([(20, 0)], 2, 80) < 5


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "give MODEL and --to FILE or --trace FILE"),
        (["smollm2"], "give MODEL and --to FILE or --trace FILE"),
        (["smollm2", "--to", "x.npz"], "x.npz: a profile is JSON"),
        (["smollm2", "--to", "no/such/x.json"], "there is no folder no/such"),
        (["smollm2", "--to", "/dev"], "/dev: can't be written"),
        (["smollm2", "--trace", "no/such/x.json"], "--trace no/such/x.json: there is no folder"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(arguments: list[str], named: str) -> None:
    answer = CliRunner().invoke(cli, ["profile", *arguments])
    assert isinstance(answer.exception, ConfigError)
    assert named in str(answer.exception)
    assert "\n" not in str(answer.exception)


def test_fits_are_printed_with_their_errors() -> None:
    answer = CliRunner().invoke(cli, ["profile", "--fits"])
    assert answer.exit_code == 0
    lines = answer.output.splitlines()
    assert any(line.startswith("h200-llama-3.1-8b-fp8 ") and "%" in line for line in lines)
    assert any(line.startswith("gb10-") and "guess" in line for line in lines)
    assert any(line.startswith("@vllm: prefill x") for line in lines)
