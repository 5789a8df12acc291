"""Engines with random logits, the real sampler and a small tokenizer, to try grammars on."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch

from bench.doubles.forward import MockForward
from mallee.mocker.passes import mock_spec
from mallee.protocol.messages import Generate, Grammar, Limits, Sampling, Update, pack_tokens
from mallee.worker.engine import Engine
from mallee.worker.forward import Draw, ForwardBatch, Logits
from mallee.worker.model.sampling.grammar import TokenGrammars
from mallee.worker.model.sampling.sampler import sample
from support.driving import drive, engine_over
from support.tokenizers_made import byte_level

TEXT = [
    '{"name": "Ada", "age": 36, "tags": ["x", "yy"], "ok": true, "none": null}',
    "the quick brown fox jumps over the lazy dog 0123456789 2024-05-06T07:08:09Z é 🌳",
    '{"a": {"b": [1.5, -2e3, false]}, "id": "3f2504e0-4f89-41d3-9a0c-0305e82c3301"}',
]


def train(path: Path) -> tokenizers.Tokenizer:
    """A small tokenizer with tokens of many characters."""
    inner = byte_level(TEXT * 50, 420, ["<end>", "<other>"])
    inner.save(str(path))
    return inner


class RandomForward(MockForward):
    """Random logits that follow from every token before; drawn by the real sampler.

    Every mask it is given is remembered with what was drawn.
    """

    drawn: list[tuple[Draw, int]]

    def forward(self, batch: ForwardBatch) -> list[Logits]:
        self.drawn = getattr(self, "drawn", [])
        rows = []
        for digest in super().forward(batch):
            random = np.random.default_rng(digest)
            rows.append(random.normal(0, 3, self.spec.vocab_size).astype(np.float32))
        return list(torch.from_numpy(np.array(rows)).unbind(0)) if rows else []

    def sample(self, draws: Sequence[Draw]) -> list[int]:
        tokens = sample(draws)
        self.drawn += zip(draws, tokens, strict=True)
        return tokens


class Lab:
    """One tokenizer, one compiler, fresh engines; texts of the branches of one command."""

    def __init__(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        self.tokenizer = train(path)
        self.vocab_size = self.tokenizer.get_vocab_size() + 5  # models pad their vocabulary
        self.eos = self.tokenizer.token_to_id("<end>")
        self.grammars = TokenGrammars(path, self.vocab_size, [self.eos])
        self.restart()

    def restart(self) -> None:
        self.engine = self.make_engine()

    def make_engine(self) -> Engine:
        spec = mock_spec(vocab_size=self.vocab_size, eos_token_ids=(self.eos,))
        self.forward = RandomForward(spec, num_blocks=2000, block_size=16)
        return engine_over(self.forward, structures=self.grammars)

    def run(self, command: Any) -> list[tuple[list[int], Update]]:
        """Tokens and last update of every branch; no masked token was drawn."""
        self.engine.submit(command, "g")
        found = drive(self.engine)
        for draw, token in self.forward.drawn:
            if draw.allowed is not None:
                assert draw.allowed[token // 32] >> (token % 32) & 1, "a masked token was drawn"
        return [found[branch] for branch in sorted(found)]

    def generate(
        self, grammar: Grammar, n: int, *, tokens: int = 600, seed: int = 0
    ) -> list[tuple[list[int], Update]]:
        self.restart()
        prompt = pack_tokens(self.tokenizer.encode(f"An answer {seed}:").ids)
        sampling = Sampling(temperature=1.0, seed=seed)
        return self.run(Generate("r", prompt, Limits(tokens), sampling, n, grammar=grammar))

    def text(self, tokens: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(list(tokens), skip_special_tokens=False)
        return text
