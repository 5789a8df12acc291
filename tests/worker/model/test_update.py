"""Other weights in the memory of those that serve: same addresses, room for a layer, all or nothing."""

import gc
import json
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bench.doubles.quantized import FORMS, Form, quantized_model, with_kv_scales
from bench.doubles.random_model import RandomModel, random_model
from mallee.protocol.errors import ModelNotFound, WeightsMismatch
from mallee.protocol.model import WeightVersion
from mallee.worker.forward import ForwardBatch, Row
from mallee.worker.kv.sides.states import NO_STATE
from mallee.worker.model.config import FAMILIES
from mallee.worker.model.runner import TorchForward, load

PROMPT = np.random.default_rng(1).integers(0, 128, 40).astype(np.uint32)
DTYPES = [("float32", True), ("bfloat16", True), ("bfloat16", False)]
PRODUCTS = ("mallee.worker.model.linear.", "mallee.worker.model.cpu.linear")
VERSION = WeightVersion(1, "next", "p")


def tensors_in(thing: object) -> list[torch.Tensor]:
    """All tensors that `thing` holds, in whatever objects."""
    found, seen, todo = [], {id(thing)}, [thing]
    while todo:
        each = todo.pop()
        if isinstance(each, torch.Tensor):
            found.append(each)
            continue
        for inner in gc.get_referents(each):
            is_data = not isinstance(inner, type | ModuleType) and not callable(inner)
            is_product = type(inner).__module__.startswith(PRODUCTS)
            if (is_data or is_product) and id(inner) not in seen:
                seen.add(id(inner))
                todo.append(inner)
    return found


def address(tensor: torch.Tensor) -> int:
    return int(torch.ops.mkldnn.data_ptr(tensor) if tensor.is_mkldnn else tensor.data_ptr())


def addresses(forward: TorchForward) -> dict[int, int]:
    """Of each tensor of its weights, by the tensor."""
    return {id(tensor): address(tensor) for tensor in tensors_in(forward.decoder.weights)}


def content(forward: TorchForward) -> list[bytes]:
    found = []
    for tensor in tensors_in(forward.decoder.weights):
        plain = tensor.to_dense() if tensor.is_mkldnn else tensor
        found.append(plain.contiguous().view(torch.uint8).numpy().tobytes())
    return found


def logits(forward: TorchForward) -> Any:
    has_states = forward.spec.has_states
    states = (np.array([NO_STATE, 0]),) if has_states else ()
    row = Row(PROMPT, 0, np.arange(10, dtype=np.int32), 1, states)
    return forward.keep(forward.forward(ForwardBatch((), [row]))[0])


class Allocations(TorchDispatchMode):
    """Counts the bytes of storages that operations make, as long as they live."""

    def __init__(self) -> None:
        super().__init__()
        self.held = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self._known |= {_key(x) for x in tree_leaves((args, kwargs)) if torch.is_tensor(x)}
        found = func(*args, **(kwargs or {}))
        for made in tree_leaves(found):
            if isinstance(made, torch.Tensor):
                self._count(made)
        return found

    def _count(self, made: torch.Tensor) -> None:
        if (key := _key(made)) in self._known:
            return
        owner = made if made.is_mkldnn else made.untyped_storage()
        self._known.add(key)
        self.held += nbytes_of(made)
        self.peak = max(self.peak, self.held)
        weakref.finalize(owner, self._free, key, nbytes_of(made))

    def _free(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.held -= nbytes


def _key(tensor: torch.Tensor) -> int:
    return address(tensor) if tensor.is_mkldnn else int(tensor.untyped_storage()._cdata)


def nbytes_of(tensor: torch.Tensor) -> int:
    """Of all that it is a view of; packed ones know it in another way."""
    if tensor.is_mkldnn:
        return int(torch.ops.mkldnn._nbytes(tensor))
    return tensor.untyped_storage().nbytes()


def layer_nbytes(forward: TorchForward) -> int:
    """Of the largest layer of its model."""
    layers = forward.decoder.weights.layers
    return max(sum(nbytes_of(tensor) for tensor in tensors_in(layer)) for layer in layers)


PLAIN = [(family, dtype, is_tied) for family in FAMILIES for dtype, is_tied in DTYPES]
QUANTIZED = [(form, how) for form in FORMS for how in ("float", "dynamic")]


def check_update(pair: list[RandomModel], dtype: str, tmp_path: Path) -> None:
    """The new model to the bit, at the addresses of the old one."""
    for model, name in zip(pair, ("old", "new"), strict=True):
        model.save(tmp_path / name)
    forward = load(tmp_path / "old", num_blocks=10, block_size=4, dtype=dtype)
    expected = load(tmp_path / "new", num_blocks=10, block_size=4, dtype=dtype)
    old, places = logits(forward), addresses(forward)
    before = content(forward)
    update = forward.prepare_update(tmp_path / "new", VERSION)
    assert content(forward) == before, "nothing is written before the update"
    assert torch.equal(logits(forward), old)
    with Allocations() as allocations:
        forward.update(update)
    assert 0 < allocations.peak <= layer_nbytes(forward)
    assert addresses(forward) == places
    assert content(forward) == content(expected) != before
    assert torch.equal(logits(forward), logits(expected))
    assert forward.spec.weights.label == "next"
    assert forward.spec.weights.digest


@pytest.mark.parametrize(("family", "dtype", "is_tied"), PLAIN)
def test_an_update_writes_over_plain_weights_with_room_for_a_layer(
    family: str, dtype: str, is_tied: bool, tmp_path: Path
) -> None:
    """Every family, packed by the CPU or not, with a head of its own or the embeddings as one."""
    pair = []
    for seed in (1, 2):
        model = random_model(family, seed, tie_word_embeddings=is_tied)
        stored = {name: tensor.to(getattr(torch, dtype)) for name, tensor in model.tensors.items()}
        pair.append(model._replace(tensors=stored))
    check_update(pair, dtype, tmp_path)


@pytest.mark.parametrize(("form", "activations"), QUANTIZED)
@pytest.mark.parametrize("ignored", [(), ("model.layers.0.self_attn.k_proj", "lm_head")])
def test_an_update_writes_over_weights_of_8_bits(
    form: Form, activations: Any, ignored: tuple[str, ...], tmp_path: Path
) -> None:
    """In every form; keys in bfloat16 beside the others, and blocks with rows of two matrices."""
    shape = {"hidden_size": 192, "intermediate_size": 256, "num_hidden_layers": 1}
    pair = [
        quantized_model(
            random_model("llama", seed, tie_word_embeddings=False, **shape),
            form,
            activations=activations,
            ignored=ignored,
        )
        for seed in (1, 2)
    ]
    check_update(pair, "bfloat16", tmp_path)


# Refused, with nothing written


def changed(model: RandomModel, **tensors: torch.Tensor | None) -> RandomModel:
    """`model` with other tensors of layer 1, by the ends of their names; None: without it."""
    found = {**model.tensors, **{f"model.layers.1.{n}": t for n, t in tensors.items()}}
    return model._replace(tensors={n: t for n, t in found.items() if t is not None})


def saved_in_part(model: RandomModel, folder: Path, least: int) -> None:
    """Without the last byte, or without the file."""
    model.save(folder)
    file = folder / "model.safetensors"
    if least:
        file.write_bytes(file.read_bytes()[:-1])
    else:
        file.unlink()


NORM, UP = "input_layernorm.weight", "mlp.up_proj.weight"
OTHERS: dict[str, tuple[Callable[[RandomModel, Path], object], str]] = {
    "missing": (lambda m, to: changed(m, **{NORM: None}).save(to), r"missing: .*1\.input_layern"),
    "shape": (lambda m, to: changed(m, **{UP: torch.ones(64, 4)}).save(to), r"up_proj.*\(64, 4\)"),
    "cut": (lambda m, to: saved_in_part(m, to, 1), "fetch it again"),
    "no file": (lambda m, to: saved_in_part(m, to, 0), "holds no"),
    "config": (
        lambda m, to: m._replace(raw={**m.raw, "rms_norm_eps": 1e-3}).save(to),
        "config differs .* in norm_eps",
    ),
    "unknown type": (
        lambda m, to: changed(m, **{UP: torch.ones(128, 64, dtype=torch.complex64)}).save(to),
        "up_proj.weight has the type C64, which torch",
    ),
}


@pytest.mark.parametrize("case", OTHERS)
def test_what_cant_serve_is_refused_before_anything_is_written(case: str, tmp_path: Path) -> None:
    """Each of these in the last of two layers."""
    save, message = OTHERS[case]
    forward = random_model(seed=1).forward()
    before = content(forward)
    save(random_model(seed=2), tmp_path)
    with pytest.raises((WeightsMismatch, ModelNotFound), match=message):
        forward.prepare_update(tmp_path, VERSION)
    assert content(forward) == before
    assert forward.spec.weights.number == 0
    logits(forward)


def test_numbers_that_make_no_sense_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    """Their values are read ahead, not only headers: a NaN among the last matrix's, its bytes intact."""
    models = [quantized_model(random_model(seed=seed), "fp8-row") for seed in (1, 2)]
    forward = models[0].forward()
    before = content(forward)
    bad = models[1].tensors["model.layers.1.mlp.up_proj.weight"].clone()
    bad.view(torch.uint8)[-1, -1] = 0xFF
    changed(models[1], **{UP: bad}).save(tmp_path)
    with pytest.raises(WeightsMismatch, match=r"1\.mlp\.up_proj\.weight holds a NaN"):
        forward.prepare_update(tmp_path, VERSION)
    assert content(forward) == before


def test_forms_that_only_the_files_tell_must_be_the_same(tmp_path: Path) -> None:
    """A head of 8 bits or not, which config.json may leave open, and scales of KV."""
    plain = random_model(seed=1, tie_word_embeddings=False)
    models = [quantized_model(plain, "fp8-block", ignored=own) for own in ((), ("lm_head",))]
    open_head = {**models[0].raw}
    for model, name in zip(models, "ab", strict=True):
        model._replace(raw=open_head).save(tmp_path / name)
    forward = load(tmp_path / "a", num_blocks=4)
    with pytest.raises(WeightsMismatch, match="has no 8 bits in lm_head, unlike the served model"):
        forward.prepare_update(tmp_path / "b", VERSION)
    forward = random_model().forward(kv_dtype="fp8")
    with_kv_scales(random_model(), [(0.5, 0.25)] * 2).save(tmp_path / "c")
    (tmp_path / "c" / "config.json").write_text(json.dumps(random_model().raw))
    with pytest.raises(WeightsMismatch, match="has scales of KV, unlike the served model"):
        forward.prepare_update(tmp_path / "c", VERSION)


# Files that change or fail between the look and the update


def prepared(folder: Path) -> tuple[TorchForward, Any]:
    forward = random_model(seed=1).forward()
    random_model(seed=2).save(folder)
    return forward, forward.prepare_update(folder, VERSION)


def test_files_that_are_replaced_meanwhile_are_read_as_they_were(tmp_path: Path) -> None:
    forward, update = prepared(tmp_path / "new")
    random_model(seed=3).save(tmp_path / "newer")
    name = "model.safetensors"
    os.replace(tmp_path / "newer" / name, tmp_path / "new" / name)
    forward.update(update)
    assert torch.equal(logits(forward), logits(random_model(seed=2).forward()))


def test_a_file_that_ends_in_the_middle_leaves_nothing_that_could_serve(tmp_path: Path) -> None:
    """Partly new weights compute no token: the process that holds them is replaced."""
    forward, update = prepared(tmp_path)
    before = content(forward)
    file = tmp_path / "model.safetensors"
    os.truncate(file, file.stat().st_size // 2)
    with pytest.raises(WeightsMismatch, match=r"can't be read as safetensors \(it ends at byte"):
        forward.update(update)
    assert content(forward) != before
    assert forward.spec.weights.number == 0
    with pytest.raises(AssertionError, match="written in part"):
        logits(forward)


def test_files_that_are_written_over_are_noticed(tmp_path: Path) -> None:
    """As large as before, and readable."""
    forward, update = prepared(tmp_path)
    file = tmp_path / "model.safetensors"
    stored = file.read_bytes()
    with file.open("r+b") as opened:
        opened.seek(len(stored) // 2)
        opened.write(bytes(len(stored) - len(stored) // 2))
    with pytest.raises(WeightsMismatch, match="changed in place; write each version to files of"):
        forward.update(update)
    with pytest.raises(AssertionError, match="written in part"):
        logits(forward)
