"""The fast path against float32 on its device, transformers' tokens, and itself in another batch."""

import json
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from bench import ROOT
from bench.doubles.attention import attend_plain
from bench.doubles.random_model import random_model
from bench.gpu.shapes import Scale
from bench.gpu.steps import GREEDY
from bench.gpu.trees import prompt
from mallee.worker.forward import Draw, ForwardBatch, Row
from mallee.worker.model.attention.base import split_batch
from mallee.worker.model.config import ModelConfig
from mallee.worker.model.runner import TorchForward

GOLDEN: Final = ROOT / "tests" / "worker" / "model" / "golden_tiny.json"
"""Prompts, and the greedy tokens that transformers gives after them, of random models."""
FAMILIES: Final = ("llama", "qwen3")
"""Those of the golden file without sliding windows."""


def prompts(scale: Scale) -> list[list[int]]:
    """Prompts of different lengths."""
    return [prompt(scale, 16 + 5 * i, 100 + i) for i in range(scale.exact_prompts)]


class Answers(NamedTuple):
    """Logits after each prompt and each later token, float32, and the tokens that were drawn or given."""

    logits: torch.Tensor  # [1 + tokens, prompts, vocab]
    tokens: list[list[int]]


class Distance(NamedTuple):
    """The distance of two forwards' logits, ||ours - theirs|| / ||theirs||."""

    error: float  # over all logits
    largest: float  # of one position
    agreement: float  # the share of positions with the same most likely token


def distance(forward: TorchForward, reference: TorchForward, scale: Scale) -> Distance:
    """After the prompts and some tokens more, which the reference draws and both are given."""
    given = prompts(scale)
    theirs = answer(reference, given, scale.error_tokens)
    ours = answer(forward, given, scale.error_tokens, forced=theirs.tokens)
    return between(ours.logits, theirs.logits)


def between(ours: torch.Tensor, theirs: torch.Tensor) -> Distance:
    """`ours` and `theirs`: [..., vocab], on one device."""
    errors, sizes = (ours - theirs).norm(dim=-1), theirs.norm(dim=-1)
    same = (ours.argmax(-1) == theirs.argmax(-1)).float().mean()
    return Distance(float(errors.norm() / sizes.norm()), float((errors / sizes).max()), float(same))


def num_equal(forward: TorchForward, scale: Scale) -> int:
    """The prompts whose greedy answer in one batch with all others is the one that they have alone."""
    given = prompts(scale)
    together = answer(forward, given, scale.exact_tokens).tokens
    alone = (answer(forward, [each], scale.exact_tokens).tokens[0] for each in given)
    return sum(ours == own for ours, own in zip(together, alone, strict=True))


def num_golden(device: str) -> tuple[int, int]:
    """The prompts of the golden file with transformers' answer on this device, and all of them.

    In float32, which on CUDA is for torch's operations; so it proves weights, rotation, norms and draws.
    """
    equal, golden = [], json.loads(GOLDEN.read_text(encoding="utf-8"))
    is_cuda = torch.device(device).type == "cuda"
    for family in FAMILIES:
        rows = golden[family]["rows"]
        model = random_model(family, tie_word_embeddings=False)
        forward = model.forward(num_blocks=2000, device=device, uses_kernels=not is_cuda)
        given = [row["prompt"] for row in rows]
        found = answer(forward, given, len(rows[0]["tokens"])).tokens
        equal += [own == row["tokens"] for own, row in zip(found, rows, strict=True)]
    return sum(equal), len(equal)


def answer(
    forward: TorchForward,
    prompts: Sequence[Sequence[int]],
    num_tokens: int,
    *,
    forced: Sequence[Sequence[int]] | None = None,
) -> Answers:
    """Greedy answers to the prompts, which go together; `forced`: these tokens in place of those drawn."""
    size, first = forward.block_size, 0
    tables = []
    for each in prompts:
        num = -(-(len(each) + num_tokens) // size)
        tables.append(np.arange(first, first + num, dtype=np.int32))
        first += num
    assert first <= forward.num_blocks, f"{first} blocks needed, there are {forward.num_blocks}"
    rows = [
        Row(np.array(each, np.uint32), 0, table, True)
        for each, table in zip(prompts, tables, strict=True)
    ]
    logits = forward.forward(ForwardBatch((), rows))
    kept = [torch.stack([each.float() for each in logits])]
    drawn: list[list[int]] = [[] for _ in prompts]
    for step in range(num_tokens):
        if forced is None:
            tokens = forward.sample([Draw(each, GREEDY, 1, 1) for each in logits])
        else:
            tokens = [own[step] for own in forced]
        for own, token in zip(drawn, tokens, strict=True):
            own.append(token)
        rows = [
            Row(np.array(own[-1:], np.uint32), len(each) + len(own) - 1, table, True)
            for own, each, table in zip(drawn, prompts, tables, strict=True)
        ]
        logits = forward.forward(ForwardBatch((), rows))
        kept.append(torch.stack([each.float() for each in logits]))
    return Answers(torch.stack(kept), drawn)


# Attention alone


def attention_errors(
    attention: Any, config: ModelConfig, size: int, device: str
) -> dict[str, float]:
    """By kind of batch, ||ours - plain|| / ||plain|| of the attention of a layer, over random KV.

    `plain` reads every key of every row in float32.
    """
    num_blocks, per_row = 1024, 64
    generator = torch.Generator().manual_seed(1)
    slot = (2, config.num_kv_heads, config.head_dim)
    memory = torch.randn(num_blocks * size, *slot, generator=generator).bfloat16().to(device)
    found = {}
    with torch.inference_mode():
        for name, rows in attention_rows(num_blocks, per_row, size).items():
            num = sum(len(row.tokens) for row in rows)
            heads = config.num_heads + config.num_kv_heads
            qk = torch.randn(num, heads, config.head_dim, generator=generator).bfloat16()
            q = qk.to(device)[:, : config.num_heads]  # as the decoder gives it: a part of both
            split = split_batch(rows, block_size=size, min_saving=attention.min_saving)
            ours = attention.attend(
                attention.prepare(split), q, memory, scale=config.query_scale
            ).float()
            plain = attend_plain(
                rows, q.float(), memory.float(), size, scale=config.query_scale, window=None
            )
            found[name] = float((ours - plain).norm() / plain.norm())
    return found


def attention_rows(num_blocks: int, per_row: int, size: int) -> dict[str, list[Row]]:
    """Batches of each kind that attention meets: decodes, prompt chunks, both, and forks of one prefix."""
    tables = [
        np.arange(begin, begin + per_row, dtype=np.int32)
        for begin in range(0, num_blocks - per_row + 1, per_row)
    ]
    starts = (0, size - 1, size, 13 * size, per_row * size - 1)
    decodes = [
        Row(np.zeros(1, np.uint32), start, table, 1)
        for start, table in zip(starts, tables, strict=False)
    ]
    chunks = [
        Row(np.zeros(num, np.uint32), start, table, 1)
        for (num, start), table in zip(((40, 0), (3, 77), (300, 500)), tables[5:], strict=False)
    ]
    trunk = np.arange(128)
    own = (np.append(trunk, num_blocks - 32 + i).astype(np.int32) for i in range(32))
    forks = [
        Row(np.zeros(1, np.uint32), len(trunk) * size + i % 3, table, 1)
        for i, table in enumerate(own)
    ]
    return {"decode": decodes, "chunks": chunks, "mixed": decodes[:3] + chunks[1:], "forks": forks}
