"""A sequence driver over scattered blocks, the plain attention as a drop-in, and the real model."""

from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from pathlib import Path

import numpy as np
import pytest
import torch

from bench.doubles.random_model import RandomModel, tensors_digest
from mallee.protocol.errors import ModelNotFound
from mallee.worker.forward import ForwardBatch, Row
from mallee.worker.kv.node import BlockCopy
from mallee.worker.kv.sides.states import NO_STATE
from mallee.worker.model.loading.source import resolve_model
from mallee.worker.model.parity.compare import load_oracle
from mallee.worker.model.runner import TorchForward
from support.grammar_lab import Lab
from support.torch_threads import torch_threads


class Sequences:
    """Hands out blocks in random order and turns (name, new tokens) into rows."""

    def __init__(self, forward: TorchForward, seed: int = 0) -> None:
        self.forward = forward
        size, total = forward.block_size, forward.num_blocks
        sides = forward.spec.sides
        # One table for all groups of layers: ids that every group has.
        num_blocks = min([total, *(g.num_blocks(total, size) for g in sides if g.kind != "state")])
        self.free = list(np.random.default_rng(seed).permutation(num_blocks))
        self.tables: dict[str, list[int]] = {}
        self.states: dict[str, int] = {}
        states = [g.num_blocks(total, size) for g in sides if g.kind == "state"]
        self.slots = cycle(range(sum(states)))
        self.tokens: dict[str, list[int]] = {}

    def row(self, name: str, new: Sequence[int], num_logits: int = 1) -> Row:
        tokens = self.tokens.setdefault(name, [])
        table = self.tables.setdefault(name, [])
        start = len(tokens)
        tokens.extend(int(t) for t in new)
        while len(table) * self.forward.block_size < len(tokens):
            table.append(int(self.free.pop()))
        own = np.asarray(table, dtype=np.int32)
        sides = tuple(
            self._slots(name) if side.kind == "state" else own for side in self.forward.spec.sides
        )
        return Row(np.asarray(new, dtype=np.uint32), start, own, num_logits, sides)

    def _slots(self, name: str) -> np.ndarray:
        """Each pass writes the slot that was in use longest ago."""
        read, used = self.states.get(name, NO_STATE), set(self.states.values())
        written = self.states[name] = next(slot for slot in self.slots if slot not in used)
        return np.array([read, written], dtype=np.int32)

    def fork(self, parent: str, child: str) -> list[BlockCopy]:
        """Share the parent's full blocks; copy the partial one."""
        size = self.forward.block_size
        num_full, rest = divmod(len(self.tokens[parent]), size)
        self.tokens[child] = list(self.tokens[parent])
        self.tables[child] = self.tables[parent][:num_full]
        if parent in self.states:
            self.states[child] = self.states[parent]
        if not rest:
            return []
        self.tables[child].append(int(self.free.pop()))
        return [BlockCopy(self.tables[parent][num_full], self.tables[child][num_full], rest)]

    def step(self, *rows: Row, copies: Sequence[BlockCopy] = ()) -> list[torch.Tensor]:
        found = self.forward.forward(ForwardBatch(copies, rows))
        return [self.forward.keep(logits) for logits in found]


class Oracle:
    """transformers' model over the same weights as `model`, without a cache."""

    def __init__(self, model: RandomModel, folder: Path, dtype: str = "float32") -> None:
        model.save(folder)
        self.model = model
        self.hf = load_oracle(folder, dtype)

    def all(self, tokens: Sequence[int]) -> torch.Tensor:
        """Logits after each of `tokens`: [n, vocab], float32."""
        with torch.inference_mode():
            logits: torch.Tensor = self.hf(torch.tensor([list(tokens)])).logits
        return logits[0].float()

    def last(self, tokens: Sequence[int]) -> torch.Tensor:
        return self.all(tokens)[-1]


@pytest.fixture(scope="session")
def oracles(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Oracle]:
    """(model, dtype) -> its oracle, made once per session."""
    made: dict[str, Oracle] = {}

    def get(model: RandomModel, dtype: str = "float32") -> Oracle:
        key = f"{dtype} {tensors_digest(model.tensors.items())} {sorted(model.raw.items())}"
        if key not in made:
            made[key] = Oracle(model, tmp_path_factory.mktemp("oracle"), dtype)
        return made[key]

    return get


@pytest.fixture(autouse=True)
def one_thread_for_small_models(request: pytest.FixtureRequest) -> Iterator[None]:
    """Small products gain nothing from threads, and lose much to them on a busy machine."""
    if request.node.get_closest_marker("process"):  # minutes of computing
        yield
        return
    with torch_threads():
        yield


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


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """Engines under real grammars, over random logits."""
    return Lab(tmp_path_factory.mktemp("tokenizer"))
