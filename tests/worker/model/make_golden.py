"""Writes transformers' greedy tokens (float32, CPU) for fifty prompts of each model: the golden files.

    python tests/worker/model/make_golden.py

golden_smollm2.json is of SmolLM2, whose prompts stay as they are there: 25 questions in the chat template,
then 25 beginnings of texts. golden_tiny.json is of a tiny random model of each family. Token ids only, so
that the tests need no tokenizer. The end-of-sequence token does not stop a row.
"""

import json
import random
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from bench.doubles.random_model import random_model, tensors_digest
from mallee.worker.model.loading.source import resolve_model
from mallee.worker.model.parity.compare import load_oracle

TARGET = Path(__file__).with_name("golden_smollm2.json")
TINY_TARGET = Path(__file__).with_name("golden_tiny.json")
NUM_TOKENS = 64
TINY_FAMILIES = {
    **{"llama": 32, "qwen3": 32, "gemma3_text": 32},
    **{"qwen3_5_text": 64, "qwen3_next": 64, "qwen3_5_moe_text": 64},
}
"""With the tokens after each prompt."""


def greedy(model: PreTrainedModel, prompt: list[int], num_tokens: int) -> list[int]:
    """The next `num_tokens` tokens, with transformers' cache."""
    tokens: list[int] = []
    cache = None
    new = torch.tensor([prompt])
    with torch.inference_mode():
        for _ in range(num_tokens):
            out = model(new, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            tokens.append(int(out.logits[0, -1].argmax()))
            new = torch.tensor([tokens[-1:]])
    return tokens


def main() -> None:
    model = AutoModelForCausalLM.from_pretrained(resolve_model("smollm2"), dtype=torch.float32)
    prompts = [row["prompt"] for row in json.loads(TARGET.read_text())]
    rows = [{"prompt": p, "tokens": greedy(model, p, NUM_TOKENS)} for p in prompts]
    TARGET.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")
    TINY_TARGET.write_text(json.dumps({family: tiny(family) for family in TINY_FAMILIES}) + "\n")


def tiny(family: str) -> dict[str, object]:
    """Rows of a model and a digest of its weights. With tied embeddings it would repeat its last token."""
    model, rng = random_model(family, tie_word_embeddings=False), random.Random(family)
    with tempfile.TemporaryDirectory() as folder:
        model.save(Path(folder))
        oracle = load_oracle(Path(folder), "float32")
    prompts = [[rng.randrange(128) for _ in range(n)] for n in range(1, 51)]
    rows = [{"prompt": p, "tokens": greedy(oracle, p, TINY_FAMILIES[family])} for p in prompts]
    return {"weights": tensors_digest(model.tensors.items()), "rows": rows}


if __name__ == "__main__":
    main()
