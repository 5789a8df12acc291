"""Random numbers by name: one seed, and for each use a stream of its own.

Streams of a counter-based generator (Philox) that differ in their key are independent, and none depends
on how much the others have drawn.
"""

import numpy as np
import xxhash

from mallee.protocol.errors import ConfigError
from mallee.traces.numbers import Floats, Ints

_MAX_SEED = 1 << 64


def check_seed(seed: int) -> int:
    """Return the seed. Raises ConfigError if it does not fit the generator's key."""
    if not 0 <= seed < _MAX_SEED:
        raise ConfigError(f"seed {seed}: give a number from 0 to 2**64 - 1")
    return seed


def stream(seed: int, name: str, number: int = 0) -> np.random.Generator:
    """Numbers that only `seed`, `name` and `number` decide, in any process."""
    digest = xxhash.xxh3_64_intdigest(name.encode(), seed=number)
    key = np.array([check_seed(seed), digest], np.uint64)
    return np.random.Generator(np.random.Philox(key=key))


def places(rng: np.random.Generator, count: int, among: int) -> Ints:
    """`count` numbers below `among`, alike likely; one number of the stream each."""
    return (rng.random(count) * among).astype(np.int64)


def scaled(values: Ints, factor: float, rng: np.random.Generator) -> Ints:
    """`values` times `factor`, rounded up or down by chance so that the mean is exact."""
    exact: Floats = values.astype(np.float64) * factor
    whole = np.floor(exact)
    is_up = rng.random(len(values)) < exact - whole
    return whole.astype(np.int64) + is_up
