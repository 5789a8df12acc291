"""Draft models made of a model itself, as no smaller one of its kind is at hand.

`cut` leaves layers out: cheaper, and seldom right, for it was never trained so. `rounded` keeps all layers,
with matrices of a few bits: right as often as a good draft model, at the price of the model.
"""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from msgspec import structs
from safetensors.torch import load_file, save_file

from mallee.protocol.messages import Sampling
from mallee.worker.forward import Draw, Logits
from mallee.worker.sched.branch import Branch
from mallee.worker.speculation.draft_model import DraftModel
from mallee.worker.speculation.worth import StepCosts

_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
_LAYERS = "model.layers."


class GreedyDrafts(DraftModel):
    """The rival of draws with a branch's own noise: the likeliest token."""

    def _draw(self, branch: Branch, logits: Logits, draft: Sequence[int]) -> Draw:
        draw = super()._draw(branch, logits, draft)
        return structs.replace(draw, sampling=Sampling())


class Free(StepCosts):
    """Positions that cost nothing: no draft is too bad."""

    def break_even(self, num_rows: int, draft_s: float = 0.0) -> float:
        return 1e-300


def cut(model: Path, folder: Path, without: range) -> Path:
    """A copy of `model` in `folder` without these layers."""
    config = json.loads((model / "config.json").read_text())
    kept = [i for i in range(config["num_hidden_layers"]) if i not in without]

    def renamed(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        found = {}
        for name, tensor in tensors.items():
            if name.startswith(_LAYERS):
                number, _, rest = name.removeprefix(_LAYERS).partition(".")
                if int(number) not in kept:
                    continue
                name = f"{_LAYERS}{kept.index(int(number))}.{rest}"
            found[name] = tensor
        return found

    return _written(model, folder, {**config, "num_hidden_layers": len(kept)}, renamed)


def rounded(model: Path, folder: Path, bits: int) -> Path:
    """A copy of `model` in `folder` whose layers' matrices have so many bits, with a scale for each row."""
    most = 2 ** (bits - 1) - 1

    def few_bits(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        found = dict(tensors)
        for name, tensor in tensors.items():
            if name.startswith(_LAYERS) and tensor.dim() == 2:
                scale = tensor.float().abs().amax(1, keepdim=True) / most
                found[name] = ((tensor.float() / scale).round() * scale).to(tensor.dtype)
        return found

    return _written(model, folder, json.loads((model / "config.json").read_text()), few_bits)


def _written(
    model: Path,
    folder: Path,
    config: Mapping[str, object],
    change: Callable[[Mapping[str, torch.Tensor]], dict[str, torch.Tensor]],
) -> Path:
    folder.mkdir()
    for name in _FILES:
        if (model / name).is_file():
            shutil.copy(model / name, folder / name)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {k: v.contiguous() for k, v in change(load_file(model / "model.safetensors")).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
