"""Steps of a model on a device: decode against the bandwidth, prefill in FLOP/s, shared prefixes."""

import statistics
import time
from collections.abc import Callable, Sequence
from itertools import count
from typing import NamedTuple

import numpy as np
import torch
from msgspec import structs

from bench.gpu.shapes import Scale, product_flops
from mallee.protocol.messages import Sampling
from mallee.worker.forward import Draw, ForwardBatch, Row
from mallee.worker.model.attention.base import NEVER_SHARED, split_batch
from mallee.worker.model.runner import TorchForward

GREEDY = Sampling(temperature=0.0)
BANDWIDTH_NBYTES = 4 << 30


def median_s(device: str, work: Callable[[], object], repeats: int) -> float:
    """Median seconds of `work` until the device is done, after two that warm up."""
    wait = synchronize(device)
    times = []
    for number in range(repeats + 2):
        wait()
        begin = time.perf_counter()
        work()
        wait()
        if number >= 2:
            times.append(time.perf_counter() - begin)
    return statistics.median(times)


def synchronize(device: str) -> Callable[[], None]:
    """A call that waits for the device."""
    if torch.device(device).type != "cuda":
        return lambda: None
    return lambda: torch.cuda.synchronize(device)


def device_of(forward: TorchForward) -> str:
    return str(forward.decoder.weights.embedding.device)


def read_bandwidth(device: str, nbytes: int = BANDWIDTH_NBYTES) -> float:
    """Bytes a second at which the device reads its memory: a sum over a large tensor."""
    values = torch.ones(nbytes // 4, dtype=torch.float32, device=device)
    return nbytes / median_s(device, lambda: values.sum(), 10)


def product_rate(device: str, size: int) -> float:
    """FLOP/s of the product of two square matrices in bfloat16."""
    a, b = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    return 2.0 * size**3 / median_s(device, lambda: a @ b, 10)


def tables(forward: TorchForward, rows: int, blocks: int, shared: int) -> list[np.ndarray]:
    """Page tables of `rows` texts of so many blocks, of which the first `shared` are the same ones."""
    numbers = count()
    common = [next(numbers) for _ in range(shared)]
    found = [
        np.array([*common, *(next(numbers) for _ in range(blocks - shared))], np.int32)
        for _ in range(rows)
    ]
    needed = next(numbers)
    assert needed <= forward.num_blocks, f"{needed} blocks needed, there are {forward.num_blocks}"
    return found


def decode_rows(found: Sequence[np.ndarray], start: int) -> list[Row]:
    """A decode at `start` of each table."""
    token = np.array([7], np.uint32)
    return [Row(token, start, table, True) for table in found]


def fill(forward: TorchForward) -> None:
    """Put numbers into the KV memory: a device may be faster on zeros."""
    generator = torch.Generator(device_of(forward)).manual_seed(1)
    for layer in forward._layers:
        layer.normal_(generator=generator)


def replay_error(forward: TorchForward, eager: TorchForward, num_rows: int) -> float:
    """||replayed - eager|| / ||eager|| of the logits of decodes of several lengths, over the same memory."""
    found = tables(forward, num_rows, 20 if num_rows < 64 else 4, 0)
    rows = [
        structs.replace(row, start=17 + 5 * i % (len(row.table) * forward.block_size - 17))
        for i, row in enumerate(decode_rows(found, 0))
    ]
    ours, theirs = (
        torch.stack([each.float() for each in own.forward(ForwardBatch((), rows))])
        for own in (forward, eager)
    )
    return float((ours - theirs).norm() / theirs.norm())


def step_s(forward: TorchForward, rows: Sequence[Row], repeats: int) -> float:
    """Seconds of a step of decodes: the pass and the draws."""
    batch = ForwardBatch((), rows)

    def step() -> None:
        logits = forward.forward(batch)
        forward.sample([Draw(each, GREEDY, 1, 1) for each in logits])

    return median_s(device_of(forward), step, repeats)


class Decode(NamedTuple):
    """A decode step, and the pass and its draws alone."""

    step_s: float
    pass_s: float
    floor_s: float  # the weights, once over the memory

    @property
    def share(self) -> float:
        return self.floor_s / self.step_s


def decode(
    forward: TorchForward, scale: Scale, bandwidth: float, step: float, num_rows: int = 1
) -> Decode:
    """Rows over short texts, `step` seconds in an engine, against the weights read at `bandwidth`."""
    weights = forward.decoder.weights
    nbytes = weights.nbytes - (0 if scale.config.tie_word_embeddings else weights.embedding.nbytes)
    rows = decode_rows(tables(forward, num_rows, 2, 0), 17)
    return Decode(step, step_s(forward, rows, scale.repeats), nbytes / bandwidth)


def prefill_flops(forward: TorchForward, scale: Scale) -> float:
    """FLOP/s of a prompt that is computed in one step."""
    num = min(scale.prompt, forward.spec.max_model_len)
    batch = prompt_batch(forward, num)
    seconds = median_s(
        device_of(forward), lambda: forward.forward(batch), max(3, scale.repeats // 4)
    )
    return product_flops(scale.config, num) / seconds


def prompt_batch(forward: TorchForward, num: int) -> ForwardBatch:
    """A prompt of `num` tokens from its beginning."""
    draw = np.random.default_rng(0)
    tokens = draw.integers(3, forward.spec.vocab_size, num).astype(np.uint32)
    (table,) = tables(forward, 1, -(-num // forward.block_size), 0)
    return ForwardBatch((), [Row(tokens, 0, table, True)])


class Shared(NamedTuple):
    """The attention of branches over one prefix, read together and by each of them."""

    shared_s: float
    flat_s: float

    @property
    def speedup(self) -> float:
        return self.flat_s / self.shared_s


def shared_attention(forward: TorchForward, scale: Scale) -> Shared:
    """Decodes of branches that share a prefix."""
    size, num = forward.block_size, scale.branches
    prefix = scale.shared // size
    branches = decode_rows(tables(forward, num, prefix + 1, prefix), prefix * size)
    return Shared(
        attention_s(forward, branches, scale.repeats, forward._attention.min_saving),
        attention_s(forward, branches, scale.repeats, NEVER_SHARED),
    )


def attention_s(forward: TorchForward, rows: Sequence[Row], repeats: int, min_saving: int) -> float:
    """Seconds of the attention of all layers of a step, its preparation left out."""
    config, attention = forward.decoder.config, forward._attention
    split = split_batch(rows, block_size=forward.block_size, min_saving=min_saving)
    reads = attention.prepare(split)
    table = forward.decoder.weights.embedding
    q = torch.randn(len(rows), config.num_heads, config.head_dim, device=table.device)
    q = q.to(table.dtype)

    def attend() -> None:
        for layer in forward._layers:
            attention.attend(reads, q, layer, scale=config.query_scale)

    with torch.inference_mode():
        return median_s(device_of(forward), attend, repeats)
