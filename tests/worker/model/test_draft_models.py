"""A model and its draft model: the same tokens or refused, and one memory for both."""

from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models

from mallee.actors.build import check_model, load_forward, make_engine
from mallee.actors.config import AppConfig
from mallee.protocol.errors import ConfigError
from mallee.protocol.ids import Incarnation, WorkerId
from mallee.protocol.messages import Generate, Limits, Sampling, pack_tokens
from mallee.testing.random_model import random_model
from mallee.worker.engine import Engine
from mallee.worker.memory.budget import GIB, MIB, DeviceMemory, Room
from mallee.worker.model.loading.vocabulary import check_same_tokens
from mallee.worker.model.runner import TorchForward, load
from support.driving import drive

pytestmark = pytest.mark.usefixtures("one_thread")

WORDS = [f"w{i}" for i in range(120)]
BLOCK = 16
OF_TARGET, OF_DRAFT = (layers * 2 * 2 * 16 * 4 for layers in (4, 2))  # bytes of a token


def save(folder: Path, words: list[str] = WORDS, *, added: str = "<end>", **config: Any) -> Path:
    """A tiny model with one token for each word."""
    folder.mkdir()
    random_model("llama", 3, **config).save(folder)
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="w0"))
    tokenizer.add_special_tokens([AddedToken(added)])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return save(tmp_path / "target", num_hidden_layers=4)


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    return save(tmp_path / "draft")


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            {"words": [*WORDS[:7], "w8", "w7", *WORDS[9:]]},
            "2 ids differ, .* 7: 'w8' there, 'w7' here",
        ),
        ({"words": [*WORDS, "more"]}, "2 ids differ, the first of them 120: 'more' there, '<end>'"),
        ({"words": WORDS[:-1]}, "2 ids differ, the first of them 119: '<end>' there, 'w119' here"),
        ({"added": "<eot>"}, "1 ids differ, the first of them 120: '<eot>' there, '<end>' here"),
        (
            {"eos_token_id": [2, 7]},
            r"ends its texts with other tokens .*\[2, 7\] there, \[2\] here",
        ),
    ],
)
def test_a_draft_model_with_other_tokens_is_refused_before_anything_is_loaded(
    target: Path, tmp_path: Path, other: dict[str, Any], message: str
) -> None:
    """I29: also of the same number of tokens. The error names both models and what differs."""
    folder = save(tmp_path / "other", **other)
    for attempt in (
        lambda: check_same_tokens(target, folder),
        lambda: load(target, num_blocks=8, draft=folder),
        lambda: check_model(settings(target, folder)),
    ):
        with pytest.raises(ConfigError, match=message) as found:
            attempt()
        assert all(str(each) in str(found.value) for each in (target, folder))


def test_a_draft_model_without_a_tokenizer_is_refused(target: Path, draft: Path) -> None:
    (draft / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"draft has no tokenizer\.json"):
        load(target, num_blocks=8, draft=draft)


def test_kv_is_for_as_many_tokens_of_both(target: Path, draft: Path) -> None:
    """I29, part: the memory that is given is shared; metrics count weights and KV of both."""
    per_block = BLOCK * (OF_TARGET + OF_DRAFT)
    forward = load(target, kv_budget_bytes=7 * per_block + 5, draft=draft)
    assert forward.draft is not None
    assert (forward.num_blocks, forward.draft.num_blocks) == (7, 7)
    assert forward.memory_stats().kv == 7 * per_block
    alone = [load(folder, num_blocks=1).memory_stats().weights for folder in (target, draft)]
    assert forward.memory_stats().weights == sum(alone)
    with pytest.raises(ConfigError, match=f"less than one block of {per_block} bytes"):
        load(target, kv_budget_bytes=per_block - 1, draft=draft)
    assert load(target, kv_budget_bytes=per_block - 1).num_blocks == 1


def room(free: int) -> Room:
    found = DeviceMemory("tiny", 4 * GIB, free)
    return Room(lambda device: found, max_rows=4, max_step_tokens=64)


def test_the_budget_has_a_line_for_the_draft_model(target: Path, draft: Path) -> None:
    """I29, part: its weights and KV; all lines are still the whole device."""
    forward = load(target, room=room(4 * GIB), draft=draft)
    budget, both = forward.budget, forward.draft
    assert budget is not None
    assert both is not None
    lines = dict(budget.lines())
    assert sum(lines.values()) == 4 * GIB
    weights = both.decoder.weights.nbytes
    assert lines["draft model"] == weights + forward.num_blocks * BLOCK * OF_DRAFT
    left = lines["KV"] - forward.num_blocks * BLOCK * OF_TARGET
    assert 0 <= left < BLOCK * (OF_TARGET + OF_DRAFT)
    assert "draft model 0." in str(budget)
    assert "draft model" not in str(load(target, room=room(4 * GIB)).budget)


@pytest.mark.slow
def test_a_device_without_room_for_both_is_refused(target: Path, tmp_path: Path) -> None:
    """I29: where the model alone has room. Also for KV that is given."""
    big = save(tmp_path / "big", intermediate_size=1 << 16, num_hidden_layers=4)
    free = 1200 * MIB
    load(target, room=room(free))
    with pytest.raises(ConfigError, match=r"no room for a block of KV.*draft model.*engine\.draft"):
        load(target, room=room(free), draft=big)
    num = free // (BLOCK * OF_TARGET) - 200
    load(target, room=room(free), num_blocks=num)
    with pytest.raises(ConfigError, match="can't be had"):
        load(target, room=room(free), num_blocks=num, draft=big)


def settings(target: Path, draft: Path | None, **engine: Any) -> AppConfig:
    values = {"kv_tokens": 4096, "speculation": "model" if draft else "off", **engine}
    if draft is not None:
        values["draft_model"] = str(draft)
    return AppConfig.model_validate({"model": str(target), "engine": values})


def answers(engine: Engine) -> list[int]:
    limits = Limits(40, ignore_eos=True)
    engine.submit(Generate("r", pack_tokens([5, 6, 7]), limits, Sampling(0.7, seed=1)), "g")
    return drive(engine)["r", 0][0]


def of_settings(config: AppConfig, forward: TorchForward | None = None) -> Engine:
    forward = forward or load_forward(config, 1)
    return make_engine(config, forward, WorkerId("w"), Incarnation(1))


def test_a_worker_drafts_by_the_model_of_its_settings(target: Path, tmp_path: Path) -> None:
    """I29, part, I15, part: after a change of the weights too. A copy of itself: it is always right."""
    copy = save(tmp_path / "copy", num_hidden_layers=4)
    config = settings(target, copy, num_speculative_tokens=3)
    forward = load_forward(config, 1)
    engine = of_settings(config, forward)
    expected = answers(of_settings(settings(target, None)))
    assert answers(engine) == expected
    stats = engine.stats().speculation
    assert stats.num_accepted == stats.num_drafted > 0
    other = save(tmp_path / "again", num_hidden_layers=4)
    changed = forward.with_weights(other, forward.spec.weights.__class__(1, "next", str(other)))
    assert changed.draft is forward.draft
    engine = of_settings(config, changed)
    assert answers(engine) == expected
    assert engine.stats().speculation.num_accepted > 0


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"speculation": "model"}, "speculation='model' needs draft_model"),
        ({"draft_model": "d"}, "draft_model='d' is not used with speculation='off'"),
        (
            {"draft_model": "d", "speculation": "sibling"},
            "is not used with speculation='sibling': set that to model or auto",
        ),
        (
            {"draft_model": "d", "speculation": "auto", "kind": "mock"},
            "a mocked engine computes no",
        ),
    ],
)
def test_settings_that_contradict_are_refused(engine: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AppConfig.model_validate({"model": "m", "engine": engine})
