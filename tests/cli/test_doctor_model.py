"""`mallee doctor-model`: what it prints and how it ends."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from bench.doubles.quantized import quantized_model
from bench.doubles.random_model import random_model
from mallee.cli.main import cli
from mallee.protocol.errors import ConfigError, ModelNotFound
from mallee.worker.model import runner

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    random_model("gemma3_text", 4).save(tmp_path)
    return tmp_path


def test_a_right_model_ends_with_0_and_every_layer_is_shown(folder: Path) -> None:
    """I3: prints embed, each layer, norm and logits with max and mean error."""
    answer = CliRunner().invoke(cli, ["doctor-model", str(folder), "--tokens", "3"])
    assert answer.exit_code == 0, answer.output
    for word in ("embed", "heads", "attention", "output", "norm", "logits", "max error", "mean"):
        assert word in answer.output
    assert "agrees with transformers in float32" in answer.output
    assert answer.output.count("heads") == 4
    answer = CliRunner().invoke(cli, ["doctor-model", str(folder), "--tokens", "2", "--json"])
    told = json.loads(answer.stdout.splitlines()[-1])
    assert told["agrees"]
    assert told["first_difference"] is None
    assert (told["dtype"], told["steps"]) == ("float32", 2)
    assert {"embed", "logits"} <= {each["site"] for each in told["sites"]}


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_moe_text"])
def test_layers_that_are_recurrent_or_have_experts_are_shown_alike(
    family: str, tmp_path: Path
) -> None:
    """I3: each with the outputs of its heads, after its attention and after its MLP."""
    random_model(family, 4).save(tmp_path)
    answer = CliRunner().invoke(cli, ["doctor-model", str(tmp_path), "--tokens", "3"])
    assert answer.exit_code == 0, answer.output
    assert [answer.stdout.count(site) for site in ("heads", "attention", "output")] == [2, 2, 2]


def test_fewer_layers_can_be_shown_and_another_dtype_computed(folder: Path) -> None:
    arguments = ["doctor-model", str(folder), "--layers", "1", "--dtype", "bfloat16"]
    answer = CliRunner().invoke(cli, arguments)
    assert answer.exit_code == 0, answer.output
    assert answer.output.count("heads") == 1
    assert "bfloat16" in answer.output


def test_a_wrong_model_ends_with_1_and_the_place_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I3: a layer that was not to be shown is, if it differs; the head's attention is dumped."""
    wrong = random_model("gemma3_text", 4, rope_parameters={"full_attention": {"rope_theta": 9.0}})

    def load_wrong(path: Path, **options: Any) -> Any:
        return wrong.forward(**{k: options[k] for k in ("num_blocks", "block_size", "dtype")})

    monkeypatch.setattr(runner, "load", load_wrong)
    answer = CliRunner().invoke(cli, ["doctor-model", str(folder), "--layers", "0"])
    assert answer.exit_code == 1
    assert "first difference: layer 2, heads, head" in answer.output
    assert "attention weights of layer 2" in answer.output


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--prompt", "hello"], ModelNotFound),  # there is no tokenizer
        (["--tokens", "500"], ConfigError),
        (["--dtype", "int3"], ConfigError),
    ],
)
def test_what_can_not_be_compared_is_refused(
    folder: Path, arguments: list[str], error: type[Exception]
) -> None:
    answer = CliRunner().invoke(cli, ["doctor-model", str(folder), *arguments])
    assert isinstance(answer.exception, error)


def test_weights_of_8_bits_are_named_and_compared(tmp_path: Path) -> None:
    """I14, part: transformers' own reader of FP8 blocks on a CPU, and the products that ran here."""
    shape = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "num_key_value_heads": 4}
    quantized_model(random_model("qwen3", 4, **shape), "fp8-block").save(tmp_path)
    answer = CliRunner().invoke(cli, ["doctor-model", str(tmp_path), "--tokens", "3"])
    assert answer.exit_code == 0, answer.output
    said = " ".join(answer.output.split())
    assert "weights of 8 bits, fp8: FP8, a scale per 128 x 128 block, dynamic" in said
    assert "agrees with transformers in float32" in said
    assert "products: 1 of float32; 8 of 8 bits in blocks, widened in each call" in said


def test_a_package_that_transformers_lacks_is_named(tmp_path: Path) -> None:
    """I14, part: compressed-tensors' files need that package there, and nothing here."""
    if importlib.util.find_spec("compressed_tensors") is not None:
        pytest.skip("compressed-tensors is installed")
    quantized_model(random_model("llama"), "int8-row").save(tmp_path)
    answer = CliRunner().invoke(cli, ["doctor-model", str(tmp_path), "--tokens", "3"])
    assert isinstance(answer.exception, ConfigError)
    assert "compressed" in str(answer.exception)
