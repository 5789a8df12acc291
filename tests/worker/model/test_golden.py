"""SmolLM2: our greedy tokens are transformers', alone, batched and forked."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mallee.protocol.messages import Sampling
from mallee.worker.forward import Draw
from mallee.worker.model.runner import TorchForward, load

pytestmark = pytest.mark.model
GOLDEN: list[dict[str, list[int]]] = json.loads(
    Path(__file__).with_name("golden_smollm2.json").read_text()
)


@pytest.fixture(scope="module")
def forward(smollm2: Path) -> TorchForward:
    return load(smollm2, num_blocks=400, dtype="float32")


def greedy(forward: TorchForward, logits: list[torch.Tensor]) -> list[int]:
    return forward.sample([Draw(row, Sampling(), 0, 0) for row in logits])


def test_ten_prompts_in_one_batch_give_transformers_greedy_tokens(
    forward: TorchForward, sequences: Callable[..., Any]
) -> None:
    """D27: 64 greedy tokens on 10 prompts, all rows in one batch, equal transformers in float32."""
    run = sequences(forward)
    names = [str(i) for i in range(len(GOLDEN))]
    found: list[list[int]] = [[] for _ in names]
    rows = [run.row(name, row["prompt"]) for name, row in zip(names, GOLDEN, strict=True)]
    for _ in range(64):
        tokens = greedy(forward, run.step(*rows))
        for own, token in zip(found, tokens, strict=True):
            own.append(token)
        rows = [run.row(name, [token]) for name, token in zip(names, tokens, strict=True)]
    assert found == [row["tokens"] for row in GOLDEN]


def test_transformers_says_the_same_of_one_prompt_now(
    smollm2: Path, forward: TorchForward, sequences: Callable[..., Any]
) -> None:
    """The golden file is not stale, and logits agree at every step of one answer (float32, 1e-3)."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    row = GOLDEN[0]
    with torch.inference_mode():
        oracle = model(torch.tensor([row["prompt"] + row["tokens"][:-1]])).logits[0]
    oracle = oracle[len(row["prompt"]) - 1 :]
    assert oracle.argmax(-1).tolist() == row["tokens"]
    run = sequences(forward)
    new = row["prompt"]
    for expected, token in zip(oracle[:12], row["tokens"], strict=False):
        ours = run.step(run.row("a", new))[0]
        assert float((ours - expected).abs().max()) < 1e-3
        new = [token]


def test_forks_of_a_shared_prefix_go_on_as_the_parent_would(
    forward: TorchForward, sequences: Callable[..., Any]
) -> None:
    """Real weights through trunk, merge and copied tail block: each child says the golden tokens."""
    run = sequences(forward)
    row = GOLDEN[-1]
    cut = 8
    logits = run.step(run.row("parent", row["prompt"] + row["tokens"][:cut]))
    children = [f"child{i}" for i in range(6)]
    copies = [copy for child in children for copy in run.fork("parent", child)]
    tokens = greedy(forward, logits) * len(children)
    for step in range(cut, cut + 12):
        assert tokens == [row["tokens"][step]] * len(children)
        rows = [run.row(c, [t]) for c, t in zip(children, tokens, strict=True)]
        tokens = greedy(forward, run.step(*rows, copies=copies))
        copies = []
    before = forward.stats()
    run.step(*(run.row(child, [1]) for child in children))
    after = forward.stats()
    reads = after.num_key_reads - before.num_key_reads
    assert reads < (after.num_flat_key_reads - before.num_flat_key_reads) / 2


def test_bfloat16_puts_the_same_token_first_where_the_lead_is_clear(
    smollm2: Path, forward: TorchForward, sequences: Callable[..., Any]
) -> None:
    narrow = load(smollm2, num_blocks=40, dtype="bfloat16")
    assert narrow.spec.kv_bytes_per_token == 23040
    assert narrow.spec.fingerprint != forward.spec.fingerprint
    num_clear = 0
    for row in GOLDEN:
        ours, wide = sequences(narrow), sequences(forward)
        low = ours.step(ours.row("a", row["prompt"]))[0].float()
        high = wide.step(wide.row("a", row["prompt"]))[0]
        best = high.topk(2)
        if float(best.values[0] - best.values[1]) > 0.5:
            num_clear += 1
            assert int(low.argmax()) == int(best.indices[0])
    assert num_clear >= 4
