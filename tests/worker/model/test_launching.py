"""Work that a device is handed without a wait, and passes over tokens that only the device knows."""

from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs

from bench.doubles.random_model import random_model
from mallee.protocol.messages import Sampling
from mallee.worker.forward import Draw, ForwardBatch, Row
from mallee.worker.kv.node import BlockCopy
from mallee.worker.model.runner import TorchForward
from mallee.worker.model.sampling import device
from support.triton_kernels import CountedKernels

SAMPLED = Sampling(temperature=1.0, logprobs=2)


def decodes(tokens: list[int], start: int) -> list[Row]:
    """Rows of one token, each over two blocks of four slots."""
    tables = [np.array([2 * i, 2 * i + 1], np.int32) for i in range(len(tokens))]
    rows = zip(tokens, tables, strict=True)
    return [Row(np.array([token], np.uint32), start, table, 1) for token, table in rows]


def draws_of(logits: Any, sampling: Sampling) -> list[Draw]:
    return [Draw(each, sampling, seed, 6) for seed, each in enumerate(logits)]


def run_twice(forward: TorchForward, prompt: list[int]) -> Any:
    """A chunk and a decode, draws of both, and the next pass of these in the other order."""
    rows = [
        Row(np.array(prompt, np.uint32), 0, np.array([9, 8, 7, 6, 5], np.int32), 1),
        *decodes([3, 4, 5], 5),
    ]
    logits = forward.forward(ForwardBatch([BlockCopy(1, 3, 2), BlockCopy(1, 5, 3)], rows))
    drawing = forward.launch_draws(draws_of(logits, SAMPLED))
    later = decodes([0, 0, 0], 6)
    return drawing, later, forward.forward_drawn(ForwardBatch((), later[::-1]), drawing, [3, 2, 1])


def test_nothing_waits_for_the_device_while_passes_are_launched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """I5, part: on a device without numbers, where to look at one raises."""
    monkeypatch.setattr(device, "kernels", CountedKernels)
    forward = random_model().forward(device="meta", uses_kernels=False)
    _, _, logits = run_twice(forward, list(range(18)))
    assert [tuple(each.shape) for each in logits] == [(128,)] * 3
    assert all(each.is_meta for each in logits)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_a_pass_over_drawn_tokens_is_that_over_the_tokens_by_name(family: str) -> None:
    """I18, part: bit for bit, whatever the order of rows and draws."""
    first, second = (random_model(family).forward() for _ in range(2))
    prompt = list(range(3, 21))
    drawing, later, ahead = run_twice(first, prompt)
    tokens = drawing.collect()
    run_twice(second, prompt)  # the same KV below
    named = [
        structs.replace(row, tokens=np.array([token], np.uint32))
        for row, token in zip(later, tokens[1:], strict=True)
    ]
    expected = second.forward(ForwardBatch((), named[::-1]))
    for own, other in zip(ahead, expected, strict=True):
        assert torch.equal(own, other)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_refuses_any_wait_while_passes_are_launched() -> None:
    """I5, part: CUDA itself tells of a wait; and the pass is right."""
    forward = random_model(head_dim=64).forward(device="cuda", dtype="bfloat16")
    prompt = list(range(3, 21))
    drawing, later, _ = run_twice(forward, prompt)
    tokens = drawing.collect()
    named = [
        structs.replace(row, tokens=np.array([token], np.uint32))
        for row, token in zip(later, tokens[1:], strict=True)
    ]
    expected = forward.forward(ForwardBatch((), named[::-1]))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        drawing, _, ahead = run_twice(forward, prompt)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert drawing.collect() == tokens
    for own, other in zip(ahead, expected, strict=True):
        assert torch.allclose(own.float(), other.float(), atol=0.1)
