"""Other weights for a model that serves, written over its own: the same tensors at the same addresses.

First the whole checkpoint is read beside the steps, so that one that can't serve is refused while nothing has
changed; that also leaves the files in the host's page cache. Then, between steps, it is read again, one
matrix at a time, and each is written where the one before it was: there is never a second model.
"""

from collections.abc import Iterator
from pathlib import Path

import torch
from msgspec.structs import replace

from mallee.protocol.errors import WeightsMismatch
from mallee.protocol.model import WeightVersion
from mallee.worker.model.config import ModelConfig
from mallee.worker.model.loading.checkpoint import Checkpoint
from mallee.worker.model.loading.reader import Parts, WeightReader
from mallee.worker.model.loading.weights import LayerWeights, ModelWeights


class WeightUpdate:
    """A checkpoint, all of which was read, and fits `weights`. Its files stay open."""

    __slots__ = ("_checkpoint", "_folder", "_reader", "_weights", "version")

    def __init__(
        self,
        folder: Path,
        config: ModelConfig,
        weights: ModelWeights,
        *,
        kv_dtype: torch.dtype,
        version: WeightVersion,
    ) -> None:
        """Only reads; may run beside the steps of `weights`.

        `self.version` is `version` with the digest that was found. Raises ModelNotFound, and WeightsMismatch:
        also if `version` has another digest.
        """
        self._folder = folder
        self._weights = weights
        self._checkpoint = Checkpoint(folder, config.weights_prefix, config.family.ignored)
        digest = self._checkpoint.digest()
        if version.digest not in ("", digest):
            raise self._mismatch(f"its digest {digest} is not {version.digest}")
        self.version = replace(version, digest=digest)
        self._reader = WeightReader(
            *(self._checkpoint.tensors, self._checkpoint.read, config),
            dtype=weights.embedding.dtype,
            device="cpu",
            kv_dtype=kv_dtype,
        )
        for what, theirs, ours in (
            ("scales of KV", self._reader.has_kv_scales, weights.has_kv_scales),
            ("8 bits in lm_head", self._reader.head_scheme, weights.head_scheme),
        ):
            if theirs != ours:
                text = f"it has {'' if theirs else 'no '}{what}, unlike the served model"
                raise self._mismatch(f"{text}; other models need another fleet")
        for parts, _ in self._parts():
            for read in (*parts.tensors.values(), *parts.products.values()):
                read()
        self._check_unchanged()

    def write(self) -> None:
        """Write it over the weights, which are used by nothing meanwhile.

        Whatever is raised, WeightsMismatch for files that have changed or can't be read any more, they are
        partly old and partly new then, and good for nothing.
        """
        for parts, own in self._parts():
            for field, tensor in parts.tensors.items():
                getattr(own, field).copy_(tensor())
            for field, product in parts.products.items():
                getattr(own, field).rewrite(product())
        table = self._weights.embedding
        if "head" not in self._reader.model().products and self._weights.head.nbytes_beside(table):
            self._weights.head.rewrite([table])
        self._check_unchanged()

    def _parts(self) -> Iterator[tuple[Parts, ModelWeights | LayerWeights]]:
        """Everything to be read, and where it belongs."""
        yield self._reader.model(), self._weights
        for i, layer in enumerate(self._weights.layers):
            yield self._reader.layer(i), layer

    def _check_unchanged(self) -> None:
        digest = self._checkpoint.digest()
        if digest != self.version.digest:
            raise self._mismatch(
                f"its digest {self.version.digest} was {digest} after it was read: the files are changed in"
                " place; write each version to files of its own"
            )

    def _mismatch(self, text: str) -> WeightsMismatch:
        return WeightsMismatch(f"{self._folder}: {text}", path=str(self._folder))
