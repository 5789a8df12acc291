"""The 8-bit forms in which checkpoints store matrices, and the matrices that have them.

Pure data: knows no tensors. `loading/quantization_json.py` reads it from config.json.
"""

import re
from dataclasses import dataclass
from typing import Literal

BLOCK = 128
"""Rows and columns of a block that shares one scale."""
ALIGNMENT = 16
"""Rows and columns of an 8-bit matrix come in multiples of this: GPUs multiply no others."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """One form of a matrix: values of 8 bits, times the scales of their block, row or matrix.

    `activations` are those of the product, as the checkpoint was made for: "float", or of 8 bits too,
    with a scale found for each row when it is multiplied ("dynamic") or stored ("static").
    """

    values: Literal["float8_e4m3fn", "int8"]
    scales: Literal["block", "row", "tensor"]
    activations: Literal["float", "dynamic", "static"]
    is_packed: bool = False  # four values to an int32

    @property
    def label(self) -> str:
        kind = "FP8" if self.values == "float8_e4m3fn" else "INT8"
        by = {"block": f"{BLOCK} x {BLOCK} block", "row": "row", "tensor": "matrix"}[self.scales]
        packed = ", packed" if self.is_packed else ""
        return f"{kind}, a scale per {by}{packed}, {self.activations} activations"


@dataclass(frozen=True, slots=True)
class Group:
    """Matrices of one scheme: those whose module's name matches one of `targets` from its start."""

    targets: tuple[str, ...]  # regular expressions, as are `Quantization.ignored`
    scheme: Scheme


@dataclass(frozen=True, slots=True)
class Quantization:
    """The matrices of a checkpoint that have 8 bits.

    With `is_head_open` config.json leaves open whether lm_head is among them: the files tell. With
    `has_kv_scales` each layer stores a scale of its keys and one of its values, for KV in FP8.
    """

    method: str  # by the name in config.json
    groups: tuple[Group, ...]
    ignored: tuple[str, ...] = ()
    is_head_open: bool = False
    has_kv_scales: bool = False

    def scheme_of(self, module: str, prefix: str = "") -> Scheme | None:
        """None if the matrix has plain floats. `prefix` is that of our names in the files."""
        names = {module, prefix + module}
        if _matches(self.ignored, names):
            return None
        found = (group.scheme for group in self.groups if _matches(group.targets, names))
        return next(found, None)

    @property
    def label(self) -> str:
        forms = list(dict.fromkeys(group.scheme.label for group in self.groups))
        if self.has_kv_scales:
            forms.append("scales of FP8 KV")
        return f"{self.method}: {'; '.join(forms)}"


def _matches(patterns: tuple[str, ...], names: set[str]) -> bool:
    return any(re.match(pattern, name) for pattern in patterns for name in names)
