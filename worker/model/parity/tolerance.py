"""Bounds on the distance of our numbers from transformers', by dtype: for tests and the doctor.

Measured on tiny random models and on SmolLM2 and Gemma 3 270M, then rounded up severalfold; a wrong
formula in any layer exceeds them by orders of magnitude.
"""

from typing import NamedTuple


class Tolerance(NamedTuple):
    """Bounds on the largest difference.

    `logits` is absolute, for models whose logits are of the order of one. The others are shares of
    the largest value at the same site and position, or of one if that is larger: `inside` holds in
    and after every layer, `outputs` for the last norm and the logits.
    """

    logits: float
    inside: float
    outputs: float


TOLERANCES: dict[str, Tolerance] = {
    "float32": Tolerance(logits=1e-4, inside=1e-4, outputs=1e-4),
    "bfloat16": Tolerance(logits=0.3, inside=0.4, outputs=0.1),
}
