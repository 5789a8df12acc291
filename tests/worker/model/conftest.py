"""A sequence driver over scattered blocks, the plain attention as a drop-in, and the real model."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from mallee.protocol.errors import ModelNotFound
from mallee.worker.forward import BlockCopy, ForwardBatch, Row
from mallee.worker.model.runner import TorchForward
from mallee.worker.model.source import resolve_model


class Sequences:
    """Hands out blocks in random order and turns (name, new tokens) into rows."""

    def __init__(self, forward: TorchForward, seed: int = 0) -> None:
        self.forward = forward
        self.free = list(np.random.default_rng(seed).permutation(forward.num_blocks))
        self.tables: dict[str, list[int]] = {}
        self.tokens: dict[str, list[int]] = {}

    def row(self, name: str, new: Sequence[int], wants_logits: bool = True) -> Row:
        tokens = self.tokens.setdefault(name, [])
        table = self.tables.setdefault(name, [])
        start = len(tokens)
        tokens.extend(int(t) for t in new)
        while len(table) * self.forward.block_size < len(tokens):
            table.append(int(self.free.pop()))
        return Row(
            np.asarray(new, dtype=np.uint32), start, np.asarray(table, dtype=np.int32), wants_logits
        )

    def fork(self, parent: str, child: str) -> list[BlockCopy]:
        """Share the parent's full blocks; copy the partial one."""
        size = self.forward.block_size
        num_full, rest = divmod(len(self.tokens[parent]), size)
        self.tokens[child] = list(self.tokens[parent])
        self.tables[child] = self.tables[parent][:num_full]
        if not rest:
            return []
        self.tables[child].append(int(self.free.pop()))
        return [BlockCopy(self.tables[parent][num_full], self.tables[child][num_full], rest)]

    def step(self, *rows: Row, copies: Sequence[BlockCopy] = ()) -> list[torch.Tensor]:
        found = self.forward.forward(ForwardBatch(copies, rows))
        return [self.forward.keep(logits) for logits in found]


@pytest.fixture(autouse=True)
def one_thread_for_tiny_models(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tiny products gain nothing from threads, and lose much to them on a busy machine."""
    if request.node.get_closest_marker("model"):
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def sequences() -> Callable[..., Sequences]:
    return Sequences


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The converted SmolLM2 directory; skips where the package is missing."""
    try:
        return resolve_model("smollm2")
    except ModelNotFound as e:
        pytest.skip(f"SmolLM2 is not here: {e}")
