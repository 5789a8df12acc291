"""Writes transformers' greedy tokens (float32, CPU) for fifty prompts of each model: the golden files.

    python tests/worker/model/make_golden.py

golden_smollm2.json is of SmolLM2, golden_tiny.json of a tiny random model of each family. Token ids
only, so that the tests need no tokenizer. The end-of-sequence token does not stop a row.
"""

import json
import random
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from mallee.testing.random_model import random_model, tensors_digest
from mallee.worker.model.doctor import load_oracle
from mallee.worker.model.loading.source import resolve_model

TARGET = Path(__file__).with_name("golden_smollm2.json")
TINY_TARGET = Path(__file__).with_name("golden_tiny.json")
NUM_TOKENS = 64
NUM_TINY_TOKENS = 32
TINY_FAMILIES = ("llama", "qwen3", "gemma3_text")
QUESTIONS = (
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Explain in two sentences why the sky is blue.",
    "List five uses of a paper clip.",
    "Translate 'good morning' to Spanish and to German.",
    "What is 17 times 23?",
    "Who wrote Romeo and Juliet?",
    "Name three rivers in South America.",
    "Summarize the water cycle for a child.",
    "Give me a recipe for pancakes.",
    "What is the difference between a virus and a bacterium?",
    "Write a polite email that declines a meeting.",
    "How many legs does a spider have?",
    "Explain recursion with an example in Python.",
    "What happens if I mix blue and yellow paint?",
    "Suggest a name for a cat that likes water.",
    "Convert 100 degrees Fahrenheit to Celsius.",
    "Is a tomato a fruit or a vegetable? Answer in one word.",
    "Tell me a short story about a lost key.",
    "What are prime numbers?",
    "Write a SQL query that counts the rows of a table called users.",
    "Why do leaves change their colour in autumn?",
    "Describe a mallee tree.",
    "Give the opposite of each word: hot, early, above.",
    "Which planet is the largest?",
)
TEXTS = (
    "def fibonacci(n):\n",
    "The quick brown fox",
    "Once upon a time, in a village by the river, there lived",
    "1, 2, 4, 8, 16,",
    "Dear Sir or Madam,\n\nI am writing to",
    "import numpy as np\n\nx = np.",
    "The three states of matter are",
    "SELECT name FROM",
    "In 1969, the first",
    "To make a cup of tea, first",
    "<html>\n<head>\n<title>",
    "a",
    "Q: What is the boiling point of water?\nA:",
    "The derivative of x^2 is",
    "Monday, Tuesday, Wednesday,",
    "Roses are red,",
    "Es war einmal ein",
    "Il \u00e9tait une fois",
    '{"name": "Alice", "age":',
    "for (int i = 0; i < n; i++) {",
    "Chapter 1\n\nIt was a dark and stormy night",
    "The mitochondria is the",
    "2 + 2 = 4\n3 + 3 = 6\n4 + 4 =",
    "Breaking news: scientists have",
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
    TINY_TARGET.write_text(json.dumps({family: tiny(family) for family in TINY_FAMILIES}) + "\n")


def tiny(family: str) -> dict[str, object]:
    """Rows of a model and a digest of its weights. With tied embeddings it would repeat its last token."""
    model, rng = random_model(family, tie_word_embeddings=False), random.Random(family)
    with tempfile.TemporaryDirectory() as folder:
        model.save(Path(folder))
        oracle = load_oracle(Path(folder), "float32")
    prompts = [[rng.randrange(128) for _ in range(n)] for n in range(1, 51)]
    rows = [{"prompt": p, "tokens": greedy(oracle, p, NUM_TINY_TOKENS)} for p in prompts]
    return {"weights": tensors_digest(model.tensors.items()), "rows": rows}


if __name__ == "__main__":
    main()
