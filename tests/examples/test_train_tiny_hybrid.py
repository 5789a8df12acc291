"""`examples/train_tiny_hybrid.py` with less of everything; the model itself is in `test_tiny_hybrid.py`."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from examples import train_tiny_hybrid
from examples.train_tiny_hybrid import (
    ROOT,
    Recipe,
    answer_from,
    chats,
    demo_chat,
    main,
    of_page,
    sentences,
    tiny_hybrid,
    train,
)
from mallee.api.text.chat import ChatTemplate
from mallee.api.text.conversation import Conversation, Message
from mallee.api.text.tokenizer import Tokenizer
from mallee.api.text.tools.formats import format_of
from mallee.cli.demo.text import DOCUMENT, QUESTIONS
from mallee.protocol.errors import ModelNotFound
from mallee.worker.model.loading.source import STAMP, made_once, resolve_model
from support.torch_threads import torch_threads

SMALL = Recipe(
    steps=24,
    vocab_size=400,
    hidden_size=64,
    intermediate_size=128,
    head_dim=32,
    linear_head_dim=32,
    window=32,
    long_window=128,
    batch_tokens=128,
    held_out_windows=8,
)
PAGE = (ROOT / "docs" / "concepts.md").read_text(encoding="utf-8")
TEXT = list(of_page(PAGE))


def trained(folder: Path, recipe: Recipe = SMALL) -> dict[str, Any]:
    with torch_threads():
        made_once(folder, lambda scratch: train(scratch, recipe, TEXT))
    found: dict[str, Any] = json.loads((folder / STAMP).read_text())
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("trained") / "hybrid"
    trained(made)
    return made


def test_a_training_lowers_the_perplexity_of_unseen_text(folder: Path) -> None:
    figures = json.loads((folder / STAMP).read_text())
    assert 350 < figures["perplexity_before"] < 500, "as if every token were as likely"
    assert figures["perplexity_after"] < figures["perplexity_before"] / 2
    assert figures["train_tokens"] == SMALL.steps * SMALL.batch_tokens


def test_transformers_and_the_service_load_the_folder(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == "qwen3_5_text"
    assert config["layer_types"] == ["linear_attention"] * 3 + ["full_attention"]
    assert config["linear_num_key_heads"] < config["linear_num_value_heads"]
    model, missing = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(missing.values())
    assert str(model.dtype) == "torch.bfloat16"
    theirs, ours = AutoTokenizer.from_pretrained(folder), Tokenizer.load(folder)
    assert ours.vocab_size == config["vocab_size"] == SMALL.vocab_size
    ends = GenerationConfig.from_pretrained(folder).eos_token_id
    assert ours.eos_token_ids == tuple(sorted(ends))
    assert theirs.convert_ids_to_tokens(ends) == ["<|im_end|>", "<|endoftext|>"]
    asked = demo_chat(QUESTIONS[0])["conversation"]
    template = ChatTemplate.load(folder, special_tokens=ours.special_tokens)
    given = Conversation(tuple(Message(each["role"], each["content"]) for each in asked[:2]))
    text = theirs.apply_chat_template(asked[:2], tokenize=False, add_generation_prompt=True)
    assert "".join(template.render(given).pieces) == text
    assert ours.encode(text) == theirs(text)["input_ids"]
    assert template.main is not None
    assert template.main == template.for_tools
    assert format_of(template.main.text) == "hermes"


@pytest.mark.slow
def test_equal_seeds_give_equal_weights(folder: Path, tmp_path: Path) -> None:
    files = ("model.safetensors", "config.json", "tokenizer.json")
    trained(tmp_path / "again")
    assert all((folder / f).read_bytes() == (tmp_path / "again" / f).read_bytes() for f in files)
    trained(tmp_path / "other", replace(SMALL, seed=1, steps=1))
    assert (folder / files[0]).read_bytes() != (tmp_path / "other" / files[0]).read_bytes()


def test_an_interrupted_training_leaves_nothing_that_is_taken_for_a_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cache = tmp_path / "mallee" / "models"

    def interrupted(folder: Path, *_: Any) -> dict[str, Any]:
        (folder / "config.json").write_text("{}")
        assert is_refused(), "while it is written"
        raise KeyboardInterrupt

    def is_refused() -> bool:
        with pytest.raises(ModelNotFound, match=r"examples/train_tiny_hybrid\.py"):
            resolve_model("tiny-hybrid")
        return True

    monkeypatch.setattr(train_tiny_hybrid, "sections", list)
    monkeypatch.setattr(train_tiny_hybrid, "train", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tiny_hybrid()
    assert [each.name for each in cache.iterdir()] == ["tiny-hybrid-1.lock"]
    (cache / "tiny-hybrid-1").mkdir()  # as `kill -9` between two calls might leave it
    (cache / "tiny-hybrid-1" / "config.json").write_text("{}")
    assert is_refused()
    monkeypatch.setattr(train_tiny_hybrid, "train", lambda *_: {"steps": 1})
    assert tiny_hybrid() == resolve_model("tiny-hybrid") == cache / "tiny-hybrid-1"


@pytest.mark.parametrize(
    ("given", "says"), [(["--steps", "3"], "another model"), (["--to", "."], "already")]
)
def test_a_model_that_is_not_tiny_hybrid_needs_a_new_folder(
    given: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(given)
    assert says in capsys.readouterr().err


def test_answers_are_sentences_of_the_text() -> None:
    rng = random.Random(0)
    found = [chat for each in TEXT for chat in chats(each, rng)]
    assert len(found) > len(TEXT)
    assert any("tools" in chat for chat in found)
    shown = [" ".join(sentences(each.text)) for each in TEXT]
    for chat in found:
        *_, asked, answer = chat["conversation"]
        assert asked["role"] in ("user", "tool")
        assert all(any(part in each for each in shown) for part in sentences(answer["content"]))
    text = " ".join(DOCUMENT.split())
    answers = [answer_from(DOCUMENT, question) for question in QUESTIONS]
    assert all(each in text for each in answers)
    assert "happens after fire" in answers[0]
    assert "length of shallow root" in answers[1]
