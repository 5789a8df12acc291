"""Rotary settings as a config.json tells them. Torch-free; `rotary.py` computes with them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mallee.protocol.errors import UnsupportedModel

DEFAULT_THETA = 10_000.0


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Positions divided by `factor` (rope_type "linear")."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1's stretched rotary frequencies (rope_type "llama3")."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True, slots=True)
class Rope:
    """How positions turn queries and keys of one kind of layer."""

    theta: float
    scaling: LinearScaling | Llama3Scaling | None = None


def parse_rope(fields: Mapping[str, Any], *, theta: Any, where: str) -> Rope:
    """The settings in `fields`; `theta` where they name none. Raises UnsupportedModel."""
    kind = fields.get("rope_type", fields.get("type", "default"))
    turned = fields.get("partial_rotary_factor")
    if turned is not None and _number(turned, "partial_rotary_factor", where) != 1:
        raise UnsupportedModel(f"{where}: partial_rotary_factor={turned!r} is not supported")
    found = fields.get("rope_theta")
    base = _number(theta if found is None else found, "rope_theta", where)
    if kind == "default":
        return Rope(base)
    names = _SCALINGS.get(str(kind))
    if names is None:
        raise UnsupportedModel(
            f"{where}: rope type {kind!r} is not supported;"
            f" supported: default, {', '.join(_SCALINGS)}",
            rope_type=str(kind),
        )
    missing = [name for name in names if fields.get(name) is None]
    if missing:
        raise UnsupportedModel(
            f"{where}: rope type {kind} without {', '.join(missing)}", rope_type=kind
        )
    values = [_number(fields[name], name, where) for name in names]
    if kind == "linear":
        return Rope(base, LinearScaling(values[0]))
    return Rope(base, Llama3Scaling(values[0], values[1], values[2], int(values[3])))


_SCALINGS = {
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
}


def _number(value: Any, name: str, where: str) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value < math.inf:
        raise UnsupportedModel(f"{where}: {name}={value!r} must be a positive number")
    return float(value)
