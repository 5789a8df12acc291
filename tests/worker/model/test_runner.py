"""TorchForward's own promises: budgets, dtypes, copies, checks, other weights, a draft model."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from msgspec import structs
from tokenizers import AddedToken, Tokenizer, models

from bench.doubles.random_model import random_model
from mallee.actors.build import check_model, load_forward
from mallee.actors.build import make_engine as make_worker
from mallee.protocol.errors import (
    ConfigError,
    DeviceMemoryExhausted,
    ModelNotFound,
    WeightsMismatch,
    from_wire,
)
from mallee.protocol.ids import Incarnation, WorkerId
from mallee.protocol.messages import Generate, Limits, Sampling, pack_tokens
from mallee.protocol.model import WeightVersion
from mallee.runtime.config import AppConfig
from mallee.worker.engine import Engine
from mallee.worker.forward import ForwardBatch
from mallee.worker.kv.node import BlockCopy
from mallee.worker.memory.budget import GIB, MIB, DeviceMemory, Room
from mallee.worker.model import runner
from mallee.worker.model.backend import Backend, choose_backend
from mallee.worker.model.loading.vocabulary import check_same_tokens
from mallee.worker.model.runner import TorchForward, load, resolve_dtype
from support.driving import drive
from support.live_fleet import make_engine
from support.torch_threads import torch_threads


def test_too_small_a_budget_is_refused(tmp_path: Path) -> None:
    random_model().save(tmp_path)
    per_block = 16 * 2 * 2 * 2 * 16 * 4
    with pytest.raises(ConfigError, match="less than one block"):
        load(tmp_path, kv_budget_bytes=per_block - 1)
    with pytest.raises(ConfigError, match="num_blocks or kv_budget_bytes"):
        load(tmp_path)
    with pytest.raises(ConfigError, match="num_blocks=0"):
        load(tmp_path, num_blocks=0)
    random_model("qwen3_5_text").save(hybrid := tmp_path / "hybrid")
    needed = load(hybrid, num_blocks=1).spec.kv_nbytes(1, 16)  # with a state
    with pytest.raises(ConfigError, match=f"less than one block of {needed} bytes"):
        load(hybrid, kv_budget_bytes=needed - 1)
    assert load(hybrid, kv_budget_bytes=needed).num_blocks == 1


def room(free: int, total: int = 2 * GIB, **options: Any) -> Room:
    found = DeviceMemory("tiny", total, free)
    return Room(lambda device: found, max_rows=4, max_step_tokens=64, **options)


def test_kv_gets_what_a_device_has_left(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """I23, part: the log has the one sum, and it is what was taken."""
    random_model().save(tmp_path)
    with caplog.at_level("INFO"):
        forward = load(tmp_path, room=room(2 * GIB))
    budget = forward.budget
    assert budget is not None
    per_block = 16 * 2 * 2 * 2 * 16 * 4
    assert forward.num_blocks == budget.kv // per_block
    assert budget.weights == forward.decoder.weights.nbytes
    assert sum(nbytes for _, nbytes in budget.lines()) == 2 * GIB
    (told,) = [r.getMessage() for r in caplog.records if r.name == runner.__name__]
    assert told == f"{budget}, for {16 * forward.num_blocks} tokens"
    assert load(tmp_path, num_blocks=8, room=room(GIB)).budget is None, "the caller decided"


def test_a_step_is_given_room_for_each_token_once_for_each_of_its_experts() -> None:
    """I23, part: 2 and 6 of 8 experts; a token's input and output of each are held at once."""
    found = []
    for chosen in (2, 6):
        model = random_model("qwen3_next", num_experts=8, num_experts_per_tok=chosen)
        forward = model.forward()
        own = (model.config, forward.decoder.weights, forward.spec)
        found.append(runner.work_of(*own, 4, room(GIB)))
    fewer, more = found
    assert more.token_nbytes - fewer.token_nbytes == 4 * 2 * 64 * 4
    assert more.weights == fewer.weights


def test_a_step_is_given_room_for_the_state_of_each_row_of_several_tokens() -> None:
    """I23, part: a matrix of one layer for each of 4 rows, in a step of 64 tokens."""
    found = []
    for dim in (32, 64):
        model = random_model("qwen3_5_text", linear_value_head_dim=dim, intermediate_size=1 << 16)
        own = (model.config, model.forward().decoder.weights, model.forward().spec)
        found.append(runner.work_of(*own, 4, room(GIB)).token_nbytes)
    values = 4 * 32  # more of them, with the gate twice, six times over and twice
    assert found[1] - found[0] == 4 * (12 * 2 * values) + 4 * (4 * 32 * values) // 64


def test_a_device_without_room_is_refused_with_the_sum(tmp_path: Path) -> None:
    random_model(max_position_embeddings=1 << 20).save(tmp_path)
    with pytest.raises(ConfigError, match=r"no room for a block of KV.*in use before 1.00 GiB"):
        load(tmp_path, room=room(GIB))
    share = (GIB + 11 * MIB) / (2 * GIB)
    with pytest.raises(ConfigError, match=r"a sequence of engine.max_model_len=100000, 0.05 GiB"):
        load(tmp_path, room=room(2 * GIB, share=share), max_model_len=100_000)
    cut = load(tmp_path, room=room(2 * GIB, share=share))  # the model's own length is cut
    assert cut.spec.max_model_len == 16 * cut.num_blocks < 1 << 20
    with pytest.raises(ConfigError, match=r"KV of 0.50 GiB .* has 0.25 GiB of 2.00 GiB free"):
        load(tmp_path, kv_budget_bytes=GIB // 2, room=room(GIB // 4))


def test_memory_that_ends_at_the_start_names_the_sum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    random_model().save(tmp_path)

    def refuse(*args: Any, **options: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB. GPU 0 has")

    with monkeypatch.context() as patched:
        patched.setattr(runner, "_lazy_zeros", refuse)
        with pytest.raises(
            ConfigError, match=r"while taking the memory of KV \(2.00 GiB of memory"
        ):
            load(tmp_path, room=room(2 * GIB))
    monkeypatch.setattr(runner, "load_weights", refuse)
    with pytest.raises(ConfigError, match="while loading the weights; lower"):
        load(tmp_path, num_blocks=4)


def test_memory_that_ends_in_a_step_costs_a_request_and_not_the_engine() -> None:
    """I26, part: torch's error in the pass, and in the draw."""
    forward = random_model().forward(num_blocks=64)
    engine = make_engine(forward, "w")
    for name, prompt in (("short", [1, 2]), ("long", list(range(1, 40)))):
        engine.submit(Generate(name, pack_tokens(prompt), Limits(6, ignore_eos=True)), "g")
    logits = forward.decoder.logits

    def tight(plan: Any, layers: Any) -> torch.Tensor:
        if plan.tokens.shape[0] > 20:
            raise torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 9.00 GiB. GPU 0 has a total capacity of 1"
            )
        return logits(plan, layers)

    forward.decoder = cast(Any, SimpleNamespace(logits=tight, config=forward.decoder.config))
    answers = drive(engine)
    assert answers["short", 0][0] == _answer(random_model().forward(num_blocks=64), [1, 2])[:6]
    tokens, last = answers["long", 0]
    error = from_wire(last.error)
    assert not tokens
    assert isinstance(error, DeviceMemoryExhausted)
    assert error.fields["reason"] == "CUDA out of memory. Tried to allocate 9.00 GiB"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_a_device_that_is_not_there_is_refused(tmp_path: Path) -> None:
    random_model().save(tmp_path)
    with pytest.raises(ConfigError, match=r"is built without CUDA: pip install .*; or give cpu"):
        load(tmp_path, num_blocks=1, device="cuda")
    with pytest.raises(ConfigError, match="give cpu or cuda"):
        load(tmp_path, num_blocks=1, device="meta")
    with pytest.raises(ConfigError, match="device='gpu'"):
        load(tmp_path, num_blocks=1, device="gpu")


def test_dtype_auto_is_the_checkpoints_where_the_cpu_can(monkeypatch: pytest.MonkeyPatch) -> None:
    wide, narrow = random_model().config, random_model(dtype="bfloat16").config
    capabilities: dict[str, bool] = {}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    assert resolve_dtype("auto", narrow, "cpu") == "float32"
    assert resolve_dtype("auto", narrow, "cuda") == "bfloat16"
    capabilities["avx512_bf16"] = True
    assert resolve_dtype("auto", narrow, "cpu") == "bfloat16"
    assert resolve_dtype("auto", wide, "cpu") == "float32"
    assert resolve_dtype("bfloat16", wide, "cpu") == "bfloat16"
    with pytest.raises(ConfigError, match="float64"):
        resolve_dtype("float64", wide, "cpu")


def test_name_length_and_threads_are_taken_over(tmp_path: Path) -> None:
    random_model().save(tmp_path)
    with torch_threads(2):
        forward = load(tmp_path, num_blocks=10, name="x", max_model_len=100, threads=1)
        assert torch.get_num_threads() == 1
    assert (forward.spec.name, forward.spec.max_model_len) == ("x", 100)
    assert load(tmp_path, num_blocks=2).spec.name == tmp_path.name
    assert load(tmp_path, num_blocks=2).spec.max_model_len == 32  # what two blocks hold


def test_a_copy_takes_the_filled_slots_of_every_layer_and_no_more(
    sequences: Callable[..., Any],
) -> None:
    """D3: only the filled slots are copied; the source's bytes stay as they were."""
    forward = random_model().forward(num_blocks=8, block_size=4)
    memory = forward._memory.view(2, 8, 4, -1)
    memory.copy_(torch.randn(memory.shape))
    before = memory.clone()
    copies = [BlockCopy(1, 5, 3), BlockCopy(2, 6, 1), BlockCopy(1, 7, 3)]
    assert forward.forward(ForwardBatch(copies, ())) == forward.sample([]) == []
    expected = before.clone()
    for copy in copies:
        expected[:, copy.dst, : copy.num_slots] = before[:, copy.src, : copy.num_slots]
    assert torch.equal(memory, expected)
    assert not torch.equal(memory, before)


def _answer(forward: TorchForward, prompt: list[int], life: int = 1) -> list[int]:
    """16 tokens of a new engine over `forward`."""
    engine = make_engine(forward, "w", life)
    engine.submit(Generate("r", pack_tokens(prompt), Limits(16, ignore_eos=True)), "g")
    return drive(engine)["r", 0][0]


def test_after_other_weights_answers_are_those_of_a_fresh_engine(tmp_path: Path) -> None:
    """Over the same KV memory, full of what the old weights left; the old ones go on beside the look."""
    folders = [tmp_path / name for name in ("old", "new")]
    for seed, folder in enumerate(folders):
        folder.mkdir()
        random_model(seed=seed).save(folder)
    prompt = list(range(1, 40))
    forward = load(folders[0], num_blocks=32, block_size=4)
    before = _answer(forward, prompt)
    spec = forward.spec
    version = WeightVersion(1, "v1", str(folders[1]))
    update = forward.prepare_update(folders[1], version)
    assert _answer(forward, prompt) == before
    left = forward.memory.digest(3, 4)
    forward.update(update)
    assert forward.memory.digest(3, 4) == left, "KV is not touched"
    changed = forward.spec
    after = _answer(forward, prompt, 2)
    assert after == _answer(load(folders[1], num_blocks=32, block_size=4), prompt)
    assert after != before
    assert changed.fingerprint == spec.fingerprint
    assert changed.salt("t") != spec.salt("t")
    forward.update(forward.prepare_update(folders[0], structs.replace(version, number=2)))
    assert _answer(forward, prompt, 3) == before
    assert forward.spec.identity not in (spec.identity, changed.identity), "another version"


def test_weights_of_another_config_or_content_are_refused(tmp_path: Path) -> None:
    same, other = tmp_path / "same", tmp_path / "other"
    for folder, model in ((same, random_model()), (other, random_model(num_hidden_layers=1))):
        folder.mkdir()
        model.save(folder)
    forward = load(same, num_blocks=8)
    version = WeightVersion(1, "v1", "p")
    with pytest.raises(WeightsMismatch, match="differs from the served model's in layers"):
        forward.prepare_update(other, version)
    with pytest.raises(WeightsMismatch, match="is not beef"):
        forward.prepare_update(same, structs.replace(version, digest="beef"))
    with pytest.raises(ModelNotFound):
        forward.prepare_update(tmp_path / "absent", version)


# A model and its draft model: the same tokens or refused, and one memory for both


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
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"other has no tokenizer\.json"):
        load(target, num_blocks=8, draft=folder)


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


def test_the_budget_has_a_line_for_the_draft_model(target: Path, draft: Path) -> None:
    """I29, part: its weights and KV; all lines are still the whole device."""
    forward = load(target, room=room(4 * GIB, 4 * GIB), draft=draft)
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
    assert "draft model" not in str(load(target, room=room(4 * GIB, 4 * GIB)).budget)


@pytest.mark.slow
def test_a_device_without_room_for_both_is_refused(target: Path, tmp_path: Path) -> None:
    """I29: where the model alone has room. Also for KV that is given."""
    big = save(tmp_path / "big", intermediate_size=1 << 16, num_hidden_layers=4)
    free = 1200 * MIB
    load(target, room=room(free, 4 * GIB))
    with pytest.raises(ConfigError, match=r"no room for a block of KV.*draft model.*engine\.draft"):
        load(target, room=room(free, 4 * GIB), draft=big)
    num = free // (BLOCK * OF_TARGET) - 200
    load(target, room=room(free, 4 * GIB), num_blocks=num)
    with pytest.raises(ConfigError, match="can't be had"):
        load(target, room=room(free, 4 * GIB), num_blocks=num, draft=big)


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
    return make_worker(config, forward, WorkerId("w"), Incarnation(1))


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
    draft = forward.draft
    forward.update(forward.prepare_update(other, WeightVersion(1, "next", str(other))))
    assert forward.draft is draft
    engine = of_settings(config, forward)
    assert answers(engine) == expected
    assert engine.stats().speculation.num_accepted > 0


@pytest.mark.parametrize(("attention", "expected"), [("auto", True), ("torch", False)])
def test_torch_s_operations_are_those_of_the_setting(
    target: Path, monkeypatch: pytest.MonkeyPatch, attention: str, expected: bool
) -> None:
    """X29, part: `engine.attention: torch`, without which CUDA demands FlashInfer."""
    seen = []

    def note(*given: Any, **options: Any) -> Backend:
        seen.append(options["uses_kernels"])
        return choose_backend(*given, **options)

    monkeypatch.setattr("mallee.worker.model.runner.choose_backend", note)
    forward = load_forward(settings(target, None, attention=attention), 1)
    forward.update(forward.prepare_update(target, WeightVersion(1, "next", str(target))))
    assert seen == [expected], "new weights choose nothing again"


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
