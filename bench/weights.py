"""Weights of 8 bits beside bfloat16: distance of the logits, perplexity, bytes, time of a step on a CPU.

    python -m bench.weights [--model smollm2] [--texts 4] [--rounds 5] [--threads 1]

The model is quantised here, by rounding to nearest, into folders such as other tools write, and loaded as
`mallee serve` loads them. Texts: 512 tokens each of this repository's documentation. Logits are compared
with those in float32; `distance` is their root mean square error as a share of their own deviation.
Decode steps are of 1, 8 and 64 rows, and the forms take turns. In this process, without Ray and HTTP. The
last line of stdout is one JSON object.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from bench import measure
from bench.doubles.quantized import Activations, Form, quantization_config, quantized_tensors
from mallee.api.text.tokenizer import Tokenizer
from mallee.worker.forward import ForwardBatch, Row
from mallee.worker.model.loading.checkpoint import weight_files
from mallee.worker.model.loading.source import resolve_model
from mallee.worker.model.runner import TorchForward, load

BLOCK: Final = 16
TEXT_TOKENS: Final = 512
BATCHES: Final = (1, 8, 64)
PLAIN: Final = "bfloat16"
DOCS: Final = Path(__file__).resolve().parents[1] / "docs"


class Case(NamedTuple):
    form: Form
    activations: Activations


CASES: Final = {
    "FP8, 128 x 128 blocks": Case("fp8-block", "dynamic"),
    "FP8 per channel": Case("fp8-row", "float"),
    "FP8 per tensor": Case("fp8-tensor", "float"),
    "INT8 per channel": Case("int8-row", "float"),
    "INT8 per channel, activations too": Case("int8-row", "dynamic"),
}


def save_quantized(source: Path, target: Path, case: Case) -> None:
    """The checkpoint in `source` with matrices of 8 bits, in `target`. Tokenizers are left out."""
    target.mkdir()
    tensors: dict[str, torch.Tensor] = {}
    for file in weight_files(source):
        tensors |= quantized_tensors(load_file(file), case.form, is_ignored="lm_head".__eq__)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = quantization_config(case.form, activations=case.activations)
    (target / "config.json").write_text(json.dumps(config))


def texts(folder: Path, count: int) -> list[list[int]]:
    """`count` runs of TEXT_TOKENS tokens, each of another page."""
    tokenizer = Tokenizer.load(folder)
    pages = (tokenizer.encode(page.read_text()) for page in sorted(DOCS.glob("*.md")))
    return [tokens[:TEXT_TOKENS] for tokens in pages if len(tokens) >= TEXT_TOKENS][:count]


def logits(forward: TorchForward, tokens: Sequence[int]) -> torch.Tensor:
    """After each of `tokens`: [n, vocab], float32."""
    decoder, seen = forward.decoder, list[torch.Tensor]()
    last = decoder.config.num_layers - 1

    def tap(site: str, layer: int | None, values: torch.Tensor) -> None:
        if (site, layer) == ("output", last):
            seen.append(values.clone())

    decoder.tap = tap
    row = Row(np.array(tokens, np.uint32), 0, np.arange(forward.num_blocks, dtype=np.int32), False)
    forward.forward(ForwardBatch((), [row]))
    decoder.tap = None
    with torch.inference_mode():
        weight = decoder.weights.norm.to(seen[0].dtype)
        normed = torch.nn.functional.rms_norm(
            seen[0], weight.shape, weight, decoder.config.norm_eps
        )
        return decoder.weights.head(normed).float()


def quality(forward: TorchForward, exact: Sequence[torch.Tensor], rows: list[list[int]]) -> Any:
    """Perplexity over `rows`, and the distance from their `exact` logits."""
    losses, errors, spread, same = [], 0.0, 0.0, 0
    for tokens, expected in zip(rows, exact, strict=True):
        found = logits(forward, tokens)
        likely = found[:-1].log_softmax(1)
        losses.append(-likely[torch.arange(len(tokens) - 1), torch.tensor(tokens[1:])].mean())
        errors += float((found - expected).square().mean())
        spread += float((expected - expected.mean(1, keepdim=True)).square().mean())
        same += int((found.argmax(1) == expected.argmax(1)).sum())
    return {
        "perplexity": float(torch.stack(losses).mean().exp()),
        "distance": (errors / spread) ** 0.5,
        "same_first": same / sum(map(len, rows)),
        "nbytes": forward.decoder.weights.nbytes,
        "products": forward.decoder.weights.products,
    }


def step(forward: TorchForward, num_rows: int) -> None:
    """A decode step of `num_rows` sequences, each at the end of a block of its own."""
    rows = [
        Row(np.array([7], np.uint32), BLOCK - 1, np.array([i], np.int32), True)
        for i in range(num_rows)
    ]
    forward.forward(ForwardBatch((), rows))


def figures(
    folder: Path, rows: list[list[int]], *, rounds: int, threads: int
) -> dict[str, dict[str, Any]]:
    """By case. The forms are in memory together, so that they can take turns."""
    num_blocks = max(-(-max(map(len, rows)) // BLOCK), max(BATCHES))

    def loaded(path: Path, dtype: str) -> TorchForward:
        return load(path, num_blocks=num_blocks, block_size=BLOCK, dtype=dtype, threads=threads)

    reference = loaded(folder, "float32")
    exact = [logits(reference, tokens) for tokens in rows]
    with tempfile.TemporaryDirectory() as name:
        forwards = {PLAIN: loaded(folder, "bfloat16")}
        for i, (title, case) in enumerate(CASES.items()):
            save_quantized(folder, Path(name) / str(i), case)
            forwards[title] = loaded(Path(name) / str(i), "bfloat16")
    found = {"float32": quality(reference, exact, rows)}
    found |= {title: quality(forward, exact, rows) for title, forward in forwards.items()}
    for batch, title, took in _steps(forwards, rounds):
        best = found[title].setdefault("step_ms", {})
        best[str(batch)] = min(took, best.get(str(batch), took))
    return found


def _steps(forwards: dict[str, TorchForward], rounds: int) -> Iterator[tuple[int, str, float]]:
    """(rows, case, milliseconds), the first round left out."""
    for i in range(rounds + 1):
        for batch in BATCHES:
            for title, forward in forwards.items():
                took = 1000 * measure.seconds(lambda f=forward, n=batch: step(f, n))  # type: ignore[misc]
                if i:
                    yield batch, title, took


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--texts", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    own = parser.parse_args(arguments)
    folder = resolve_model(own.model)
    rows = texts(folder, own.texts)
    found = figures(folder, rows, rounds=own.rounds, threads=own.threads)
    for title, each in found.items():
        print(title, measure.rounded(each), file=sys.stderr)
    print(
        json.dumps(
            {
                "model": own.model,
                "tokens": sum(map(len, rows)),
                "threads": own.threads,
                "cases": measure.rounded(found),
                **measure.machine(),
            }
        )
    )


if __name__ == "__main__":
    main()
