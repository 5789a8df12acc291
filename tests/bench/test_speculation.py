"""The bench of speculation, on a tiny model."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from bench.engine.drafts import cut, rounded
from bench.engine.speculation import main
from mallee.testing.random_model import random_model
from mallee.worker.model.runner import load
from support.tokenizers_made import byte_level

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    random_model("llama", 5, vocab_size=320, num_hidden_layers=4).save(tmp_path / "m")
    byte_level().save(str(tmp_path / "m" / "tokenizer.json"))
    return tmp_path / "m"


def test_every_choice_is_measured_and_float32_answers_are_plain_ones(
    model: Path, tmp_path: Path
) -> None:
    """I15, part: on a model without the layers that its copy would lack: that one is always right."""
    out = tmp_path / "out.json"
    args = ("--tokens", "6", "--rounds", "1", "--rows", "2", "--dtype", "float32")
    main(["--model", str(model), *args, "--out", str(out)])
    result = json.loads(out.read_text())
    assert set(result["loads"]) == {"repeat, 2", "chat, 2", "again, 2"}
    for runs in result["loads"].values():
        assert set(runs) == {"off", "prompt", "sibling", "model"}
        assert all(run["same"] == 1.0 for run in runs.values())
    always = result["always"]["float32"]
    assert len(always) == 3
    assert all(run["same"] == 1.0 and run["drafted"] for run in always.values())
    assert always["without 6 layers, temperature 0, own noise"]["acceptance"] == 1.0


def test_a_copy_lacks_layers_or_bits(model: Path, tmp_path: Path) -> None:
    whole = load_file(model / "model.safetensors")
    shorter = load(cut(model, tmp_path / "cut", range(1, 3)), num_blocks=4)
    assert shorter.decoder.config.num_layers == 2
    kept = load_file(tmp_path / "cut" / "model.safetensors")
    name = "mlp.down_proj.weight"
    assert kept[f"model.layers.1.{name}"].equal(whole[f"model.layers.3.{name}"])
    rounded(model, tmp_path / "rounded", 3)
    few = load_file(tmp_path / "rounded" / "model.safetensors")
    assert len(few[f"model.layers.0.{name}"][5].unique()) <= 7
    assert few["model.embed_tokens.weight"].equal(whole["model.embed_tokens.weight"])
