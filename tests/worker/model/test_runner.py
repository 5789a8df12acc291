"""TorchForward's own promises: budgets, dtypes, copies, kept logits, checks."""

import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from msgspec import structs

from mallee.protocol.errors import (
    ConfigError,
    DeviceMemoryExhausted,
    ModelNotFound,
    WeightsMismatch,
    from_wire,
)
from mallee.protocol.messages import Generate, Limits, pack_tokens
from mallee.protocol.model import WeightVersion
from mallee.testing.random_model import random_model
from mallee.worker.forward import Forward, ForwardBatch
from mallee.worker.kv.node import BlockCopy
from mallee.worker.memory.budget import GIB, MIB, DeviceMemory, Room
from mallee.worker.model import runner
from mallee.worker.model.runner import TorchForward, load, resolve_dtype
from mallee.worker.model.tolerance import TOLERANCES
from support.driving import drive
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


def room(free: int, **options: Any) -> Room:
    """On a device of 2 GiB."""
    found = DeviceMemory("tiny", 2 * GIB, free)
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
    forward = load(tmp_path, num_blocks=4)
    monkeypatch.setattr(runner, "load_weights", refuse)
    with pytest.raises(ConfigError, match="while loading the weights; lower"):
        load(tmp_path, num_blocks=4)
    version = WeightVersion(1, "v1", str(tmp_path))
    with pytest.raises(ConfigError, match="while loading other weights beside those that serve"):
        forward.with_weights(tmp_path, version)


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


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3_text"])
def test_a_row_gives_the_logits_after_each_of_its_last_positions(
    sequences: Callable[..., Any], kind: str
) -> None:
    """I15, part: as many as it asks for, beside rows of one token, of prompts and of forks; as one by one."""
    rng = random.Random(kind)
    text = [rng.randrange(128) for _ in range(41)]
    tails = [[rng.randrange(128) for _ in range(6)] for _ in range(3)]
    forward = random_model(kind, 3).forward()
    run, alone = sequences(forward), sequences(random_model(kind, 3).forward())
    for each in (run, alone):
        each.step(each.row("a", text, 0))
        copies = [copy for name in "bc" for copy in each.fork("a", name)]
        each.step(copies=copies)
    rows = [run.row("a", tails[0], 4), run.row("d", text[:9], 0), run.row("b", tails[1], 6)]
    found = run.step(*rows, run.row("c", tails[2][:1]))
    expected = [alone.step(alone.row("a", [token]))[0] for token in tails[0]][2:]
    expected += [alone.step(alone.row("b", [token]))[0] for token in tails[1]]
    expected += alone.step(alone.row("c", tails[2][:1]))
    assert len(found) == 4 + 6 + 1
    torch.testing.assert_close(found, expected, atol=TOLERANCES["float32"].logits, rtol=0)


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


def _answer(forward: TorchForward, prompt: list[int], life: int = 1) -> list[int]:
    """16 tokens of a new engine over `forward`."""
    engine = make_engine(forward, "w", life)
    engine.submit(Generate("r", pack_tokens(prompt), Limits(16, ignore_eos=True)), "g")
    return drive(engine)["r", 0][0]


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
