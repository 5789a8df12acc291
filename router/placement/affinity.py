"""The home of a prompt cache key: the worker that its requests prefer.

A key says that its requests will have prompts in common. The index knows what they have in common only
once some worker computed it; until then, and where a prompt is known to several workers alike, nothing
but the key tells that they belong together. `pricing` counts a token to compute twice: the request waits
for it, and so do later ones. On the home of a request's key it counts once, because what is computed there
serves later requests of the key. So a request waits at its home for as long as its own prefill takes,
and goes to another worker where that is sooner.

The home follows from the key and the names of the live workers (rendezvous hashing): all gateways agree on it
and remember nothing, no other key's requests change it, and a worker that comes or goes moves only those
keys that it is, or was, the home of.
"""

from typing import Final

import numpy as np

from mallee.protocol.hashing import Hashes
from mallee.router.placement.kernels.score import Floats

_ODD: Final = np.uint64(0x9E3779B97F4A7C15)
_HALF: Final = np.uint64(32)


def home_slot(affinity: int, workers: Hashes, room: Floats) -> int:
    """The slot of the home of a key with the digest `affinity`; -1 if no worker has room at all.

    `workers`: digests of names [num_slots]; `room`: KV blocks [num_slots], 0 where nothing may go.
    """
    mixed = (workers ^ np.uint64(affinity)) * _ODD
    mixed = (mixed ^ (mixed >> _HALF)) * _ODD
    mixed[room <= 0.0] = 0
    best = int(mixed.argmax()) if len(mixed) else -1
    return best if best >= 0 and room[best] > 0.0 else -1
