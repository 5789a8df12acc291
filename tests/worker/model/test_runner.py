"""TorchForward's own promises: budgets, dtypes, copies, kept logits, checks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs

from mallee.protocol.errors import ConfigError, ModelNotFound, WeightsMismatch
from mallee.protocol.messages import Generate, Limits, Sampling, pack_tokens
from mallee.protocol.model import WeightVersion
from mallee.testing.random_model import random_model
from mallee.worker.forward import Draw, Forward, ForwardBatch
from mallee.worker.kv.node import BlockCopy
from mallee.worker.model.runner import TorchForward, load, resolve_dtype
from support.live_fleet import make_engine


def test_it_is_a_forward() -> None:
    forward: Forward = random_model().forward(num_blocks=5, block_size=8)
    assert (forward.num_blocks, forward.block_size) == (5, 8)
    assert forward.spec.kv_bytes_per_token == 2 * 2 * 2 * 16 * 4
    assert forward.forward(ForwardBatch((), ())) == []
    assert forward.sample([]) == []


def test_a_budget_in_bytes_becomes_blocks(tmp_path: Path) -> None:
    random_model().save(tmp_path)
    per_block = 16 * 2 * 2 * 2 * 16 * 4
    forward = load(tmp_path, kv_budget_bytes=7 * per_block + 5)
    assert forward.num_blocks == 7
    assert forward.stats().kv_nbytes == 7 * per_block
    forward.check()
    with pytest.raises(ConfigError, match="less than one block"):
        load(tmp_path, kv_budget_bytes=per_block - 1)
    with pytest.raises(ConfigError, match="num_blocks or kv_budget_bytes"):
        load(tmp_path)
    with pytest.raises(ConfigError, match="num_blocks=0"):
        load(tmp_path, num_blocks=0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_a_device_that_is_not_there_is_refused(tmp_path: Path) -> None:
    random_model().save(tmp_path)
    with pytest.raises(ConfigError, match="finds no CUDA device; give cpu"):
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
    before = torch.get_num_threads()
    try:
        forward = load(tmp_path, num_blocks=10, name="x", max_model_len=100, threads=1)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
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
    assert forward.forward(ForwardBatch(copies, ())) == []
    expected = before.clone()
    for copy in copies:
        expected[:, copy.dst, : copy.num_slots] = before[:, copy.src, : copy.num_slots]
    assert torch.equal(memory, expected)
    assert not torch.equal(memory, before)


def test_kept_logits_outlive_later_steps_and_pin_nothing(sequences: Callable[..., Any]) -> None:
    forward = random_model().forward()
    run = sequences(forward)
    rows = [run.row(name, [1, 2, i]) for i, name in enumerate("abc")]
    given = forward.forward(ForwardBatch((), rows))
    kept = forward.keep(given[1])
    assert kept.untyped_storage().nbytes() == 128 * 4
    copy = kept.clone()
    run.step(*(run.row(name, [5]) for name in "abc"))
    assert torch.equal(kept, copy)


def test_equal_steps_give_equal_bits(sequences: Callable[..., Any]) -> None:
    outcomes = []
    for _ in range(2):
        run = sequences(random_model("llama", 9).forward(), seed=4)
        run.step(run.row("a", list(range(20))), run.row("b", [3] * 30))
        outcomes.append(torch.stack(run.step(run.row("a", [1]), run.row("b", [2]))))
    assert torch.equal(outcomes[0], outcomes[1])


def test_fused_forks_draw_what_a_linear_run_draws(sequences: Callable[..., Any]) -> None:
    """D19: sampled text of every child equals the text of a run that never forked."""
    sampling = Sampling(temperature=0.9, top_k=40, top_p=0.95)
    model = random_model("llama", 12)
    prompt = [i % 128 for i in range(3, 150)]
    run = sequences(model.forward(num_blocks=300))
    logits = run.step(run.row("parent", prompt))[0]
    names = [f"c{i}" for i in range(8)]
    copies = [copy for name in names for copy in run.fork("parent", name)]
    latest = [logits] * len(names)
    for _ in range(12):
        draws = [
            Draw(own, sampling, 100 + i, len(run.tokens[name]))
            for i, (name, own) in enumerate(zip(names, latest, strict=True))
        ]
        tokens = run.forward.sample(draws)
        rows = [run.row(name, [token]) for name, token in zip(names, tokens, strict=True)]
        latest = run.step(*rows, copies=copies)
        copies = []
    assert len({tuple(run.tokens[name]) for name in names}) == len(names)
    for i, name in enumerate(names):
        alone = sequences(model.forward(num_blocks=300), seed=i + 1)
        own = alone.step(alone.row("x", prompt))[0]
        for _ in range(12):
            draw = Draw(own, sampling, 100 + i, len(alone.tokens["x"]))
            own = alone.step(alone.row("x", alone.forward.sample([draw])))[0]
        assert alone.tokens["x"] == run.tokens[name]


def _answer(forward: TorchForward, prompt: list[int], life: int = 1) -> list[int]:
    """16 tokens of a new engine over `forward`."""
    engine = make_engine(forward, "w", life)
    engine.submit(Generate("r", pack_tokens(prompt), Limits(16, ignore_eos=True)), "g")
    tokens: list[int] = []
    while engine.has_work:
        for frame in engine.step().frames.values():
            tokens += [token for update in frame.updates for token in update.tokens]
    engine.check()
    return tokens


def test_after_other_weights_answers_are_those_of_a_fresh_engine(tmp_path: Path) -> None:
    """Over the same KV memory, full of what the old weights left; the old ones go on beside the load."""
    folders = [tmp_path / name for name in ("old", "new")]
    for seed, folder in enumerate(folders):
        folder.mkdir()
        random_model(seed=seed).save(folder)
    prompt = list(range(1, 40))
    forward = load(folders[0], num_blocks=32, block_size=4)
    before = _answer(forward, prompt)
    version = WeightVersion(1, "v1", str(folders[1]))
    changed = forward.with_weights(folders[1], version)
    assert _answer(forward, prompt) == before
    after = _answer(changed, prompt, 2)
    assert after == _answer(load(folders[1], num_blocks=32, block_size=4), prompt)
    assert after != before
    assert changed.spec.fingerprint == forward.spec.fingerprint
    assert changed.spec.salt("t") != forward.spec.salt("t")
    assert changed.memory.digest(3, 4) == forward.memory.digest(3, 4), "not the same memory"
    again = changed.with_weights(folders[0], structs.replace(version, number=2))
    assert _answer(again, prompt, 3) == before
    assert again.spec.identity != forward.spec.identity, "the same weights, another version"


def test_weights_of_another_config_or_content_are_refused(tmp_path: Path) -> None:
    same, other = tmp_path / "same", tmp_path / "other"
    for folder, model in ((same, random_model()), (other, random_model(num_hidden_layers=1))):
        folder.mkdir()
        model.save(folder)
    forward = load(same, num_blocks=8)
    version = WeightVersion(1, "v1", "p")
    with pytest.raises(WeightsMismatch, match="differs from the served model's in layers"):
        forward.with_weights(other, version)
    with pytest.raises(WeightsMismatch, match="is not beef"):
        forward.with_weights(same, structs.replace(version, digest="beef"))
    with pytest.raises(ModelNotFound):
        forward.with_weights(tmp_path / "absent", version)
