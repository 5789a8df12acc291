"""Checkpoints: single and sharded files load alike; anything that doesn't fit stops the load."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mallee.protocol.errors import ModelNotFound, WeightsMismatch
from mallee.worker.model.random_llama import RandomLlama, random_llama
from mallee.worker.model.weights import ModelWeights, load_weights, weights_digest


@pytest.fixture
def model() -> RandomLlama:
    return random_llama(1, tie_word_embeddings=False)


def load(folder: Path, model: RandomLlama, dtype: torch.dtype = torch.float32) -> ModelWeights:
    return load_weights(folder, model.config, dtype=dtype, device="cpu")


def save_sharded(model: RandomLlama, folder: Path, num_shards: int = 3) -> None:
    names = sorted(model.tensors)
    where = {}
    for i in range(num_shards):
        file = f"model-{i + 1:05}-of-{num_shards:05}.safetensors"
        own = names[i::num_shards]
        save_file({name: model.tensors[name] for name in own}, folder / file)
        where.update(dict.fromkeys(own, file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))


def all_tensors(weights: ModelWeights) -> list[torch.Tensor]:
    layers = [tensor for layer in weights.layers for tensor in layer]
    return [weights.embedding, weights.norm, weights.head, *layers]


def test_sharded_and_single_files_load_alike(model: RandomLlama, tmp_path: Path) -> None:
    """D38: loader tests, single and sharded."""
    single, sharded = tmp_path / "single", tmp_path / "sharded"
    sharded.mkdir()
    model.save(single)
    save_sharded(model, sharded)
    pairs = zip(all_tensors(load(single, model)), all_tensors(load(sharded, model)), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_fused_matrices_hold_their_parts_in_order(model: RandomLlama, tmp_path: Path) -> None:
    model.save(tmp_path)
    layer = load(tmp_path, model).layers[1]
    prefix = "model.layers.1."
    q, k, v = torch.split(layer.qkv, [64, 32, 32], dim=1)
    gate, up = layer.gate_up.chunk(2, dim=1)
    for part, name in (
        (q, "self_attn.q_proj"),
        (k, "self_attn.k_proj"),
        (v, "self_attn.v_proj"),
        (gate, "mlp.gate_proj"),
        (up, "mlp.up_proj"),
        (layer.down, "mlp.down_proj"),
    ):
        assert torch.equal(part.t(), model.tensors[f"{prefix}{name}.weight"])


def test_tied_weights_share_memory_and_a_stored_copy_is_ignored(tmp_path: Path) -> None:
    model = random_llama(1)
    model.save(tmp_path)
    weights = load(tmp_path, model)
    assert weights.head is weights.embedding
    copy = {"lm_head.weight": model.tensors["model.embed_tokens.weight"].clone()}
    model._replace(tensors={**model.tensors, **copy}).save(tmp_path)
    assert load(tmp_path, model).head.shape == weights.head.shape


def test_weights_come_in_the_dtype_asked_for(model: RandomLlama, tmp_path: Path) -> None:
    model.save(tmp_path)
    found = {tensor.dtype for tensor in all_tensors(load(tmp_path, model, torch.bfloat16))}
    assert found == {torch.bfloat16}


def test_a_mismatch_lists_what_is_missing_unexpected_and_misshapen(
    model: RandomLlama, tmp_path: Path
) -> None:
    tensors = dict(model.tensors)
    del tensors["model.norm.weight"]
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(64)
    tensors["lm_head.weight"] = torch.zeros(5, 64)
    model._replace(tensors=tensors).save(tmp_path)
    with pytest.raises(WeightsMismatch) as caught:
        load(tmp_path, model)
    assert caught.value.fields == {
        "missing": ["model.norm.weight"],
        "unexpected": ["model.layers.0.self_attn.q_proj.bias"],
        "wrong_shapes": ["lm_head.weight (5, 64) instead of (128, 64)"],
    }
    assert "model.norm.weight" in str(caught.value)


def test_a_long_list_of_mismatches_is_cut_in_the_text_only(
    model: RandomLlama, tmp_path: Path
) -> None:
    model._replace(tensors={"model.norm.weight": torch.ones(64)}).save(tmp_path)
    with pytest.raises(WeightsMismatch, match=r"and \d+ more") as caught:
        load(tmp_path, model)
    assert len(caught.value.fields["missing"]) == 2 + 2 * 9


def test_absent_files_and_shards_are_named(model: RandomLlama, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"no \.safetensors"):
        load(tmp_path, model)
    save_sharded(model, tmp_path)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ModelNotFound, match="model-00002-of-00003"):
        load(tmp_path, model)


def test_the_digest_tells_checkpoints_apart(model: RandomLlama, tmp_path: Path) -> None:
    model.save(tmp_path / "a")
    model.save(tmp_path / "b")
    random_llama(2, tie_word_embeddings=False).save(tmp_path / "c")
    a, b, c = (weights_digest(tmp_path / name) for name in "abc")
    assert a == b
    assert a != c
