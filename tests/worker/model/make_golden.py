"""Writes golden_smollm2.json: transformers' greedy tokens (float32, CPU) for ten prompts.

    python tests/worker/model/make_golden.py

Token ids only, so that the test needs no tokenizer. The end-of-sequence token does not stop a row.
"""

import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from mallee.worker.model.source import resolve_model

TARGET = Path(__file__).with_name("golden_smollm2.json")
NUM_TOKENS = 64
QUESTIONS = (
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Explain in two sentences why the sky is blue.",
    "List five uses of a paper clip.",
    "Translate 'good morning' to Spanish and to German.",
)
TEXTS = (
    "def fibonacci(n):\n",
    "The quick brown fox",
    "Once upon a time, in a village by the river, there lived",
    "1, 2, 4, 8, 16,",
    "A mallee is a tree of many trunks from one root, which re-sprouts after fire. " * 8,
)


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
    folder = resolve_model("smollm2")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompts = [
        tokenizer(
            str(
                tokenizer.apply_chat_template(
                    [{"role": "user", "content": question}],
                    add_generation_prompt=True,
                    tokenize=False,
                )
            )
        )["input_ids"]
        for question in QUESTIONS
    ]
    prompts += [tokenizer(text)["input_ids"] for text in TEXTS]
    rows = [{"prompt": p, "tokens": greedy(model, p, NUM_TOKENS)} for p in prompts]
    TARGET.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")


if __name__ == "__main__":
    main()
