"""The fast path against torch operations on the same weights, and against itself in another batch."""

from collections.abc import Sequence

import numpy as np
import torch

from bench.gpu.shapes import Scale
from bench.gpu.steps import GREEDY
from bench.gpu.trees import prompt
from mallee.worker.forward import Draw, ForwardBatch, Row
from mallee.worker.model.runner import TorchForward


def prompts(scale: Scale) -> list[list[int]]:
    """Prompts of different lengths."""
    return [prompt(scale, 16 + 5 * i, 100 + i) for i in range(scale.exact_prompts)]


def largest_error(forward: TorchForward, reference: TorchForward, scale: Scale) -> float:
    """Difference of logits after the prompts, as a share of the largest: together, and each by itself."""
    given = prompts(scale)
    found, _ = answer(forward, given, 0)
    errors = []
    for i, each in enumerate(given):
        expected = answer(reference, [each], 0)[0][0]
        errors.append(float((found[i] - expected).abs().max() / expected.abs().max()))
    return max(errors)


def num_equal(forward: TorchForward, scale: Scale) -> int:
    """The prompts whose greedy answer in one batch with all others is the one that they have alone."""
    given = prompts(scale)
    _, together = answer(forward, given, scale.exact_tokens)
    alone = (answer(forward, [each], scale.exact_tokens)[1][0] for each in given)
    return sum(ours == own for ours, own in zip(together, alone, strict=True))


def answer(
    forward: TorchForward, prompts: Sequence[Sequence[int]], num_tokens: int
) -> tuple[torch.Tensor, list[list[int]]]:
    """Logits after each prompt, float32, and its greedy answer; the prompts go together."""
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
    kept = torch.stack([each.float() for each in logits])
    drawn: list[list[int]] = [[] for _ in prompts]
    for _ in range(num_tokens):
        for own, token in zip(
            drawn, forward.sample([Draw(each, GREEDY, 1, 1) for each in logits]), strict=True
        ):
            own.append(token)
        rows = [
            Row(np.array(own[-1:], np.uint32), len(each) + len(own) - 1, table, True)
            for own, each, table in zip(drawn, prompts, tables, strict=True)
        ]
        logits = forward.forward(ForwardBatch((), rows))
    return kept, drawn
