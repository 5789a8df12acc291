"""Answers whose capsules are moved about, and the bytes of the KV that must not change by it."""

import json
from typing import Final

import torch

from bench.doubles.quantized import with_kv_scales
from bench.doubles.random_model import random_model
from mallee.protocol.messages import Capture, Generate, Grammar, Limits, Sampling, pack_tokens
from mallee.worker.engine import Engine
from mallee.worker.kv.paths import side_tables
from mallee.worker.model.runner import TorchForward

NUM: Final = 64
CUTS: Final = (2, 35)
PROMPT: Final = [3 + i * 7 % 100 for i in range(77)]
LIMITS: Final = Limits(NUM, ignore_eos=True)
_PATHS = [[3 + (i * j) % 125 for i in range(1, 7)] * 11 for j in range(1, 40)]
CHOICE: Final = Grammar("choice", json.dumps([path + [3 + i] * 9 for i, path in enumerate(_PATHS)]))
WAYS: Final[dict[str, tuple[Sampling, Grammar | None]]] = {
    "greedy": (Sampling(), None),
    "sampled": (Sampling(1.0, seed=11), None),
    "constrained": (Sampling(1.0, seed=12), CHOICE),
}
CASES: Final = [
    ("llama", "float32", "auto", "greedy"),
    ("llama", "bfloat16", "auto", "sampled"),
    ("llama", "float32", "fp8", "constrained"),
    ("qwen3", "float32", "auto", "sampled"),
    ("qwen3", "bfloat16", "fp8", "greedy"),
    ("qwen3", "bfloat16", "scaled fp8", "constrained"),
    ("gemma3_text", "float32", "auto", "constrained"),
    ("gemma3_text", "bfloat16", "fp8", "greedy"),
    ("gemma3_text", "float32", "scaled fp8", "sampled"),
    ("qwen3_5_text", "float32", "auto", "greedy"),
    ("qwen3_5_text", "bfloat16", "auto", "sampled"),
    ("qwen3_5_text", "float32", "fp8", "constrained"),
]
"""Families, types of weights, types of KV, ways to draw."""
MODELS: Final = [case[:3] for case in CASES]


def tiny_forward(
    kind: str, dtype: str, kv_dtype: str, *, num_blocks: int, block_size: int
) -> TorchForward:
    """A model for one of CASES; Gemma's window is shorter than PROMPT."""
    model = random_model(kind, 5, **({"sliding_window": 10} if kind == "gemma3_text" else {}))
    if kv_dtype == "scaled fp8":
        model, kv_dtype = with_kv_scales(model), "fp8"
    return model.forward(
        num_blocks=num_blocks, block_size=block_size, dtype=dtype, kv_dtype=kv_dtype
    )


def drawn_with_captures(engine: Engine, way: str) -> list[int]:
    """The uninterrupted answer to PROMPT. Capsules `c{cut}.0` are taken from it on its way, at CUTS."""
    sampling, grammar = WAYS[way]
    engine.submit(Generate("g", pack_tokens(PROMPT), LIMITS, sampling, grammar=grammar), "g")
    whole: list[int] = []
    taken: set[int] = set()
    while len(whole) < NUM:
        for frame in engine.step().frames.values():
            whole += [token for update in frame.updates for token in update.tokens]
        for cut in CUTS:
            if len(whole) >= cut and cut not in taken:
                taken.add(cut)
                engine.submit(Capture(f"c{cut}", "g"), "g")
    return whole


def kv_bytes(engine: Engine, forward: TorchForward, name: str) -> bytes:
    """The bytes of a capsule: its tokens' slots alone, in windows those that are read; and its state."""
    capsule = engine._capsules.peek(name)
    assert capsule is not None
    assert capsule.node is not None
    num = capsule.num_computed
    tables = (engine._tree.table(capsule.node), *side_tables(capsule.node, forward.block_size))
    found = []
    for table, group, memory in zip(
        tables, forward.spec.groups or (None,), forward._memories, strict=True
    ):
        if group is not None and group.kind == "state":
            found.append(memory[int(table[0])].numpy().tobytes())
            continue
        window = None if group is None else group.window
        begin = 0 if window is None else max(0, num - window + 1)
        size = forward.block_size
        slots = [int(table[i // size]) * size + i % size for i in range(begin, num)]
        found.append(memory.view(torch.uint8)[:, slots].numpy().tobytes())
    return b"".join(found)
