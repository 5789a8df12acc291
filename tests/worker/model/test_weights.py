"""Checkpoints: single and sharded files load alike; anything that doesn't fit stops the load."""

import copy
import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from mallee.protocol.errors import ModelNotFound, WeightsMismatch
from mallee.testing.random_model import RandomModel, random_model
from mallee.worker.model.config import FAMILIES
from mallee.worker.model.linear.base import Linear
from mallee.worker.model.loading.stored import expected_shapes
from mallee.worker.model.loading.weights import (
    ModelWeights,
    fuse_weights,
    load_weights,
    weights_digest,
)


@pytest.fixture
def model() -> RandomModel:
    return random_model("llama", 1, tie_word_embeddings=False)


def load(folder: Path, model: RandomModel, dtype: torch.dtype = torch.float32) -> ModelWeights:
    return load_weights(folder, model.config, dtype=dtype, device="cpu")


def save_sharded(model: RandomModel, folder: Path, num_shards: int = 3) -> None:
    names = sorted(model.tensors)
    where = {}
    for i in range(num_shards):
        file = f"model-{i + 1:05}-of-{num_shards:05}.safetensors"
        own = names[i::num_shards]
        save_file({name: model.tensors[name] for name in own}, folder / file)
        where.update(dict.fromkeys(own, file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))


def matrix(linear: Linear, num_inputs: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The checkpoint's [out, in], whatever the layout it is kept in."""
    return linear(torch.eye(num_inputs, dtype=dtype)).t()


def all_tensors(weights: ModelWeights) -> list[torch.Tensor]:
    dtype = weights.embedding.dtype
    found = [weights.embedding, weights.norm, matrix(weights.head, 64, dtype)]
    for layer in weights.layers:
        assert layer.qk_norm is layer.attention_norm is layer.output_norm is None  # a Llama
        found += [layer.input_norm, layer.mlp_norm, matrix(layer.down, 128, dtype)]
        found += [matrix(part, 64, dtype) for part in (layer.qkv, layer.output, layer.gate_up)]
    return found


def test_sharded_and_single_files_load_alike(model: RandomModel, tmp_path: Path) -> None:
    """D38: loader tests, single and sharded."""
    single, sharded = tmp_path / "single", tmp_path / "sharded"
    sharded.mkdir()
    model.save(single)
    save_sharded(model, sharded)
    pairs = zip(all_tensors(load(single, model)), all_tensors(load(sharded, model)), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_fused_matrices_hold_their_parts_in_order(model: RandomModel, tmp_path: Path) -> None:
    model.save(tmp_path)
    layer = load(tmp_path, model).layers[1]
    prefix = "model.layers.1."
    q, k, v = torch.split(matrix(layer.qkv, 64), [64, 32, 32])
    gate, up = matrix(layer.gate_up, 64).chunk(2)
    for part, name in (
        (q, "self_attn.q_proj"),
        (k, "self_attn.k_proj"),
        (v, "self_attn.v_proj"),
        (matrix(layer.output, 64), "self_attn.o_proj"),
        (gate, "mlp.gate_proj"),
        (up, "mlp.up_proj"),
        (matrix(layer.down, 128), "mlp.down_proj"),
    ):
        assert torch.equal(part, model.tensors[f"{prefix}{name}.weight"])


def test_tied_weights_are_the_embeddings_and_a_stored_copy_is_ignored(tmp_path: Path) -> None:
    model = random_model("llama", 1)
    model.save(tmp_path)
    weights = load(tmp_path, model)
    assert torch.equal(matrix(weights.head, 64), weights.embedding)
    copy = {"lm_head.weight": 2 * model.tensors["model.embed_tokens.weight"]}
    model._replace(tensors={**model.tensors, **copy}).save(tmp_path)
    assert torch.equal(matrix(load(tmp_path, model).head, 64), weights.embedding)


def test_weights_come_in_the_dtype_asked_for(model: RandomModel, tmp_path: Path) -> None:
    model.save(tmp_path)
    found = {tensor.dtype for tensor in all_tensors(load(tmp_path, model, torch.bfloat16))}
    assert found == {torch.bfloat16}


def test_a_mismatch_lists_what_is_missing_unexpected_and_misshapen(
    model: RandomModel, tmp_path: Path
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
        "wrong_tensors": ["lm_head.weight (5, 64) instead of (128, 64)"],
    }
    assert "model.norm.weight" in str(caught.value)


def test_a_long_list_of_mismatches_is_cut_in_the_text_only(
    model: RandomModel, tmp_path: Path
) -> None:
    model._replace(tensors={"model.norm.weight": torch.ones(64)}).save(tmp_path)
    with pytest.raises(WeightsMismatch, match=r"and \d+ more") as caught:
        load(tmp_path, model)
    assert len(caught.value.fields["missing"]) == 2 + 2 * 9


def test_quantized_tensors_are_refused(model: RandomModel, tmp_path: Path) -> None:
    """I2: integers without their scales would be computed with as if they were weights."""
    name = "model.layers.0.mlp.up_proj.weight"
    packed = {**model.tensors, name: model.tensors[name].to(torch.int8)}
    model._replace(tensors=packed).save(tmp_path)
    with pytest.raises(WeightsMismatch, match=r"up_proj\.weight torch\.int8"):
        load(tmp_path, model)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_tensors_of_each_family_are_those_of_transformers(family: str) -> None:
    """I2: the name map, with every shape."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model = random_model(family, tie_word_embeddings=False)
    theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**copy.deepcopy(model.raw)))
    shapes = {name: tuple(tensor.shape) for name, tensor in theirs.state_dict().items()}
    assert expected_shapes(model.config) == shapes


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_does_not_load_as_another(family: str, tmp_path: Path) -> None:
    random_model(family).save(tmp_path)
    for other in FAMILIES:
        if other != family:
            with pytest.raises(WeightsMismatch):
                load(tmp_path, random_model(other))


def test_a_norms_offset_is_added_once_and_in_float32() -> None:
    """I1, part: Gemma's norms multiply by 1 + weight, which bfloat16 would round."""
    model = random_model("gemma3_text")
    weights = fuse_weights(dict(model.tensors), model.config, dtype=torch.bfloat16, device="cpu")
    layer, p = weights.layers[2], "model.layers.2."
    heads = [model.tensors[f"{p}self_attn.{x}_norm.weight"] + 1 for x in ("q",) * 4 + ("k",) * 2]
    for ours, theirs in (
        (weights.norm, model.tensors["model.norm.weight"] + 1),
        (layer.input_norm, model.tensors[p + "input_layernorm.weight"] + 1),
        (layer.attention_norm, model.tensors[p + "post_attention_layernorm.weight"] + 1),
        (layer.mlp_norm, model.tensors[p + "pre_feedforward_layernorm.weight"] + 1),
        (layer.output_norm, model.tensors[p + "post_feedforward_layernorm.weight"] + 1),
        (layer.qk_norm, torch.stack(heads)),
    ):
        assert ours is not None
        assert torch.equal(ours, theirs)


def test_absent_files_and_shards_are_named(model: RandomModel, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"no \.safetensors"):
        load(tmp_path, model)
    save_sharded(model, tmp_path)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ModelNotFound, match="model-00002-of-00003"):
        load(tmp_path, model)


@pytest.mark.parametrize(
    "keep", [0, 4, 100, -1], ids=["empty", "no header", "header", "all but one"]
)
def test_a_file_cut_short_is_named(model: RandomModel, tmp_path: Path, keep: int) -> None:
    """I2: a broken download is refused with the file's name, not with a stack of the reader's."""
    save_sharded(model, tmp_path)
    file = tmp_path / "model-00002-of-00003.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(WeightsMismatch, match=r"model-00002-of-00003.* fetch it again"):
        load(tmp_path, model)


@pytest.mark.parametrize(
    "text",
    ["{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": "../elsewhere.safetensors"}}'],
)
def test_a_broken_index_is_named(model: RandomModel, tmp_path: Path, text: str) -> None:
    model.save(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(WeightsMismatch, match=r"model\.safetensors\.index\.json"):
        load(tmp_path, model)


def test_a_tensor_in_two_shards_is_refused(model: RandomModel, tmp_path: Path) -> None:
    save_sharded(model, tmp_path)
    extra = {"model.norm.weight": torch.zeros(64)}
    for file in sorted(tmp_path.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            own = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        save_file({**own, **extra}, file)
    with pytest.raises(WeightsMismatch, match=r"model\.norm\.weight is in another file too"):
        load(tmp_path, model)


def test_the_digest_tells_checkpoints_apart(model: RandomModel, tmp_path: Path) -> None:
    model.save(tmp_path / "a")
    model.save(tmp_path / "b")
    random_model("llama", 2, tie_word_embeddings=False).save(tmp_path / "c")
    a, b, c = (weights_digest(tmp_path / name) for name in "abc")
    assert a == b
    assert a != c
