"""Trains a small hybrid from nothing: Qwen3.5's text architecture, minutes on two cores, no download.

    python examples/train_tiny_hybrid.py
    mallee demo --model tiny-hybrid

Three of four layers fold their prefix into a state (gated delta net), the fourth attends to all of it. The
text is this checkout's: docs, some sources, licences of packages, and the document of `mallee demo`, which
the model learns by heart. Part of it is put as chats: questions about a heading or a passage, whose answers
are sentences of the text, and calls of a tool. The model is for demos, tests and benches of state: it says
sentences of its text, often not the one that was asked for, and may go on past the answer's end.

Writes a Hugging Face folder (bfloat16), whole or not at all, and prints one JSON object last. Equal seeds
give equal weights on one machine, with equal packages and threads. Perplexity is that of unseen text.
"""

import argparse
import json
import math
import os
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, distribution
from itertools import permutations
from pathlib import Path
from typing import Any, Final

if (
    __name__ == "__main__"
):  # before torch starts threads: spinning ones starve each other on a busy machine
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import tokenizers
import torch
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from torch.nn.functional import cross_entropy
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
)
from transformers.utils import logging as hf_logging

from mallee.api.text.families import FAMILIES
from mallee.cli.demo.command import SYSTEM
from mallee.cli.demo.text import DOCUMENT, QUESTIONS
from mallee.worker.model.loading.source import (
    STAMP,
    default_cache_dir,
    made_once,
    tiny_hybrid_folder,
)

ROOT: Final = Path(__file__).resolve().parents[1]
SOURCES: Final = ("examples", "search", "sessions", "graphs")
FIGURES: Final = ("CHANGELOG.md", "benchmarks.md", "promises.md")  # nothing to ask about
LICENSED: Final = ("torch", "numpy", "transformers", "tokenizers", "matplotlib", "pillow")
LICENCE_CHARS: Final = 120_000  # of all packages together
SECTION_CHARS: Final = 1500
TITLE_CHATS: Final = 8  # of a section, each put in one of a few ways
HELD_OUT_EVERY: Final = 20  # sections
MIN_UNSEEN_CHARS: Final = 300  # of those held out: the glossary is for all questions
LOG_STEPS: Final = 20

END_OF_TEXT, BEGIN_TURN, END_OF_TURN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
TOOL_TOKENS: Final = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
TOOL: Final = {
    "type": "function",
    "function": {
        "name": "read_page",
        "description": "Read a page of the documentation.",
        "parameters": {"type": "object", "properties": {"title": {"type": "string"}}},
    },
}
INSTRUCTION: Final = SYSTEM.partition("\n")[0]

_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z`*])")
_LINK = re.compile(r"\[([^\]]+)\]\([^)]*\)")
_MARKER = re.compile(r"^ *(?:[-*]|[0-9]+\.) +", re.MULTILINE)
_GLOSS = re.compile(r"^\| \*([^*|]+)\* \| ([^|]+) \|$", re.MULTILINE)
_FENCE = re.compile(r"^```.*?^```\s*?$", re.MULTILINE | re.DOTALL)
_WORD = re.compile(r"[A-Za-z]{3,}")
_LONG_WORD = re.compile(r"[A-Za-z]{6,}")


@dataclass(frozen=True, slots=True)
class Recipe:
    """Shape of the model and course of the training; tests take less of everything."""

    seed: int = 0
    steps: int = 450
    vocab_size: int = 2048
    hidden_size: int = 320
    intermediate_size: int = 896
    num_layers: int = 4
    head_dim: int = 64
    linear_head_dim: int = 64  # of values; keys have half
    window: int = 256  # tokens of a row
    long_window: int = 2048  # of the rows of the last steps: the demo's document and a question
    batch_tokens: int = 2048
    lr: float = 4e-3
    held_out_windows: int = 64


USUAL: Final = Recipe()


@dataclass(frozen=True, slots=True)
class Section:
    """A piece of text; `title` is its heading, empty where it has none or nobody would ask for it."""

    title: str
    text: str
    is_prose: bool = True


# -- The text


def sections(root: Path = ROOT) -> list[Section]:
    """All text of the checkout at `root` and of licences, in an order of its own."""
    found = []
    pages = [root / "README.md", root / "CHANGELOG.md", *sorted((root / "docs").rglob("*.md"))]
    for page in pages:
        of_it = of_page(page.read_text(encoding="utf-8"))
        found += [replace(each, title="") if page.name in FIGURES else each for each in of_it]
    for folder in SOURCES:
        for source in sorted((root / folder).rglob("*.py")):
            pieces = _pieces(source.read_text(encoding="utf-8"))
            found += [Section("", each, is_prose=False) for each in pieces]
    found += [Section("", piece) for piece in _pieces("\n\n".join(_licences()))]
    return found


def of_page(text: str) -> Iterator[Section]:
    """The sections and the glossary of a page. Its other tables and its code say little, and are left out."""
    plain = _LINK.sub(r"\1", _FENCE.sub("", text))
    for word, meaning in _GLOSS.findall(plain):
        yield Section(word, f"A {word} is {meaning}.")
    prose = "\n".join(line for line in plain.splitlines() if not line.startswith(("|", "<", "![")))
    _, *parts = re.split(r"^#+ +(.+)$", prose, flags=re.MULTILINE)
    for title, part in zip(parts[::2], parts[1::2], strict=True):
        for i, piece in enumerate(_pieces(part)):
            yield Section("" if i else title.strip(), piece)


def _pieces(text: str) -> Iterator[str]:
    """The text in pieces of whole paragraphs."""
    piece = ""
    for paragraph in re.split(r"\n\s*\n", text.strip()):
        if piece and len(piece) + len(paragraph) > SECTION_CHARS:
            yield piece
            piece = ""
        piece += ("\n\n" if piece else "") + paragraph
    if piece.strip():
        yield piece


def _licences() -> list[str]:
    """Paragraphs of licences, each once: most packages repeat the same few."""
    paragraphs: dict[str, str] = {}
    for name in LICENSED:
        try:
            files = distribution(name).files or []
        except PackageNotFoundError:
            continue
        for file in sorted(files, key=str):
            path = Path(str(file.locate()))
            if "licen" in path.name.lower() and path.suffix in ("", ".txt", ".md"):
                text = path.read_text(encoding="utf-8", errors="ignore")
                for paragraph in re.split(r"\n\s*\n", text):
                    paragraphs.setdefault(" ".join(paragraph.split()), paragraph)
    kept, num_chars = [], 0
    for paragraph in paragraphs.values():
        num_chars += len(paragraph)
        if num_chars > LICENCE_CHARS:
            break
        kept.append(paragraph)
    return kept


def sentences(text: str) -> list[str]:
    """Each in one line, without the marks of lists."""
    return [" ".join(each.split()) for each in _SENTENCE_END.split(_MARKER.sub("", text).strip())]


def answer_from(text: str, question: str) -> str:
    """The sentence of `text` that shares the rarest words with `question`, and the next one."""
    found = sentences(text)
    words = [{word.lower() for word in _WORD.findall(each)} for each in found]
    counts = Counter(word for each in words for word in each)
    asked = {word.lower() for word in _WORD.findall(question)}
    scores = [sum(counts[word] ** -0.5 for word in each & asked) for each in words]
    best = max(range(len(found)), key=lambda i: (scores[i], -i))
    return " ".join(found[best : best + 2])


# -- Chats


def chats(section: Section, rng: random.Random) -> Iterator[dict[str, Any]]:
    """Conversations about a section, as arguments of the chat template."""
    found = [each for each in sentences(section.text) if 30 < len(each) < 300]
    if section.title and found:
        title, answer = section.title.rstrip(".?"), found[0]
        for _ in range(TITLE_CHATS):
            ask = rng.choice(("What is {}?", "What is a {}?", "Tell me about {}.", "Explain {}."))
            question = ask.format(rng.choice((title, title.lower())))
            yield {"conversation": [_said("user", question), _said("assistant", answer)]}
        call = {"name": "read_page", "arguments": {"title": title}}
        turns = [
            _said("user", f"Read the page about {title}."),
            {**_said("assistant", ""), "tool_calls": [{"type": "function", "function": call}]},
            _said("tool", " ".join(found[:2])),
            _said("assistant", answer),
        ]
        if rng.random() < 0.3:
            yield {"conversation": turns, "tools": [TOOL]}
    for begin in range(0, len(found) - 2, 4):
        passage = " ".join(found[begin : begin + 4])
        given = _said("system", f"{INSTRUCTION}\n\n{passage}")
        yield {"conversation": [given, *_reading(passage, rng)]}


def _reading(passage: str, rng: random.Random) -> list[dict[str, Any]]:
    """A question about a sentence of the passage, by a word that no other sentence has, and that sentence."""
    counts = Counter(_LONG_WORD.findall(passage))
    by_word = {
        word: each
        for each in sentences(passage)
        for word in _LONG_WORD.findall(each)
        if counts[word] == 1
    }
    word, answer = rng.choice([*by_word.items()] or [("this text", passage)])
    ask = rng.choice(("What does the text say about {}?", "What about {}?", "Tell me about {}."))
    return [_said("user", ask.format(word)), _said("assistant", answer)]


def demo_chat(*questions: str) -> dict[str, Any]:
    """The demo's own, with answers that are copied from its document."""
    turns = [_said("system", SYSTEM)]
    for each in questions:
        turns += [_said("user", each), _said("assistant", answer_from(DOCUMENT, each))]
    return {"conversation": turns}


def _said(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


# -- Tokens


def made_tokenizer(texts: Sequence[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE with the turns and tools of ChatML."""
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(TOOL_TOKENS),
        special_tokens=[END_OF_TEXT, BEGIN_TURN, END_OF_TURN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(texts, trainer)
    inner.add_tokens([AddedToken(each, special=False, normalized=False) for each in TOOL_TOKENS])
    made = PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token=END_OF_TURN, pad_token=END_OF_TEXT
    )
    made.chat_template = next(each.template for each in FAMILIES if each.name == "chatml")
    return made


class Rows:
    """Rows of token ids to learn from: windows at random places, and at the end the demo's document."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, given: Sequence[Section], recipe: Recipe
    ) -> None:
        self._recipe = recipe
        self._rng = rng = random.Random(recipe.seed)  # noqa: S311
        shown = [f"# {each.title}\n\n{each.text}" if each.title else each.text for each in given]
        shown += [DOCUMENT] * 3
        passages = [Section("", each) for each in DOCUMENT.split("\n\n")] * 4
        prose = [each for each in (*given, *passages) if each.is_prose]
        told = [chat for section in prose for chat in chats(section, rng)]
        shown += [str(tokenizer.apply_chat_template(**chat, tokenize=False)) for chat in told]
        rng.shuffle(shown)
        self.ids = _joined(tokenizer, shown)
        asked = [demo_chat(*each) for each in permutations(QUESTIONS, 2)]
        texts = [str(tokenizer.apply_chat_template(**chat, tokenize=False)) for chat in asked]
        self._demo = [_joined(tokenizer, [each]) for each in texts]

    def batch(self, *, is_long: bool) -> torch.Tensor:
        """[rows, tokens] of the recipe's `batch_tokens`."""
        if is_long:
            begins = [self._rng.choice(self._demo)[: self._recipe.long_window]]
        else:
            begins = [self.ids[:0]] * (self._recipe.batch_tokens // self._recipe.window)
        size = self._recipe.long_window if is_long else self._recipe.window
        rows = []
        for begin in begins:
            rest = size - len(begin)
            place = self._rng.randrange(len(self.ids) - rest)
            rows.append(torch.cat((begin, self.ids[place : place + rest])))
        return torch.stack(rows)


def _joined(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> torch.Tensor:
    """The ids of all texts, with an end of text after each."""
    ends = tokenizer.convert_tokens_to_ids(END_OF_TEXT)
    encoded = tokenizer(list(texts), add_special_tokens=False)["input_ids"]
    return torch.tensor([i for each in encoded for i in (*each, ends)])


# -- The model


def made_model(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> Qwen3_5ForCausalLM:
    """Random weights: three linear layers, then one of full attention, tied embeddings."""
    heads = recipe.hidden_size // recipe.head_dim
    linear_heads = recipe.hidden_size // recipe.linear_head_dim // 2 * 2
    num_turned = recipe.head_dim // 8  # a quarter of a head is turned, in pairs
    config = Qwen3_5TextConfig(
        vocab_size=len(tokenizer),
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.num_layers,
        num_attention_heads=heads // 2 * 2,
        num_key_value_heads=2,
        head_dim=recipe.head_dim,
        linear_num_key_heads=linear_heads // 2,
        linear_num_value_heads=linear_heads,
        linear_key_head_dim=recipe.linear_head_dim // 2,
        linear_value_head_dim=recipe.linear_head_dim,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "partial_rotary_factor": 0.25,
            "mrope_interleaved": True,
            "mrope_section": [num_turned - 2 * (num_turned // 3), *[num_turned // 3] * 2],
        },
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen3_5ForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("dt_bias"):
                # Steps from 0.001 to 0.1, as in Mamba 2: transformers' own forget all within a few tokens.
                steps = torch.exp(torch.empty_like(weight).uniform_(math.log(1e-3), math.log(0.1)))
                weight.copy_(steps + torch.log(-torch.expm1(-steps)))
    return model


def _losses(model: Qwen3_5ForCausalLM, rows: torch.Tensor, *, autocast: bool) -> torch.Tensor:
    """The mean loss of all tokens but the first of each row."""
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        # In short rows the squares of chunks cost most on a CPU, in long ones the scan over chunks.
        chunk = 32 if rows.shape[1] <= 512 else 64
        logits = model(input_ids=rows, use_cache=False, chunk_size=chunk).logits
    return cross_entropy(logits[:, :-1].flatten(0, 1).float(), rows[:, 1:].flatten())


@torch.inference_mode()
def perplexity(model: Qwen3_5ForCausalLM, ids: torch.Tensor, recipe: Recipe) -> float:
    num = min(recipe.held_out_windows, len(ids) // recipe.window)
    rows = ids[: num * recipe.window].view(num, recipe.window).split(8)
    losses = [_losses(model, each, autocast=False).item() * len(each) for each in rows]
    return math.exp(sum(losses) / num)


def _optimizers(model: Qwen3_5ForCausalLM, lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices within layers, AdamW for all else."""
    matrices, others = [], []
    for name, weight in model.named_parameters():
        is_matrix = weight.ndim == 2 and "embed" not in name and min(weight.shape) >= 32
        (matrices if is_matrix else others).append(weight)
    return [
        torch.optim.Muon(matrices, lr=lr, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]


def _rate(step: int, steps: int) -> float:
    """Warms up, stays, and falls over the last half."""
    return min(1.0, (step + 1) / (0.04 * steps), 2.0 * (1 - step / steps))


def train(folder: Path, recipe: Recipe, given: Sequence[Section]) -> dict[str, Any]:
    """Train a model on `given` and write it to `folder`, which exists. Returns the figures of the run."""
    begin = time.perf_counter()
    torch.manual_seed(recipe.seed)
    order = random.Random(recipe.seed).sample(given, len(given))  # noqa: S311
    unseen = [each for each in order if len(each.text) > MIN_UNSEEN_CHARS][::HELD_OUT_EVERY]
    seen = [each for each in order if each not in unseen]
    tokenizer = made_tokenizer([each.text for each in given], recipe.vocab_size)
    held_out = _joined(tokenizer, [each.text for each in unseen])
    rows = Rows(tokenizer, seen, recipe)
    model = made_model(recipe, tokenizer)
    num_parameters = sum(each.numel() for each in model.parameters())
    before = perplexity(model, held_out, recipe)
    optimizers = _optimizers(model, recipe.lr)
    autocast = torch.backends.mkldnn.is_available() and torch.cpu._is_avx512_bf16_supported()
    num_tokens, began = 0, time.perf_counter()
    for step in range(recipe.steps):
        batch = rows.batch(is_long=step > 0.7 * recipe.steps and step % 5 == 0)
        loss = _losses(model, batch, autocast=autocast)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = recipe.lr * _rate(step, recipe.steps)
            optimizer.step()
            optimizer.zero_grad()
        num_tokens += batch.numel()
        if step % LOG_STEPS == 0:
            speed = num_tokens / (time.perf_counter() - began)
            print(
                f"step {step} of {recipe.steps}: loss {loss.item():.2f}, {speed:.0f} tokens/s",
                file=sys.stderr,
                flush=True,
            )
    seconds = time.perf_counter() - began
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    ends = [tokenizer.eos_token_id, tokenizer.pad_token_id]
    GenerationConfig(eos_token_id=ends, pad_token_id=ends[1]).save_pretrained(folder)
    after = perplexity(model.float(), held_out, recipe)  # of what is written
    return {
        "parameters": num_parameters,
        "vocab_size": len(tokenizer),
        "train_tokens": num_tokens,
        "text_tokens": len(rows.ids),
        "seconds": round(time.perf_counter() - begin, 1),
        "tokens_per_second": round(num_tokens / seconds, 1),
        "perplexity_before": round(before, 2),
        "perplexity_after": round(after, 2),
    }


def tiny_hybrid() -> Path:
    """The folder of tiny-hybrid; trains the model, for minutes, if no process has done so yet."""
    folder = tiny_hybrid_folder(default_cache_dir())
    return made_once(folder, lambda scratch: train(scratch, USUAL, sections()))


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Train a tiny hybrid on text of this checkout.")
    where = "A folder to make; by default that of the model tiny-hybrid."
    parser.add_argument("--to", type=Path, help=where)
    parser.add_argument("--seed", type=int, default=USUAL.seed)
    parser.add_argument("--steps", type=int, default=USUAL.steps)
    parser.add_argument("--threads", type=int, default=2, help="1 on a busy machine.")
    asked = parser.parse_args(given)
    recipe = replace(USUAL, seed=asked.seed, steps=asked.steps)
    if asked.to is None and recipe != USUAL:
        parser.error("--seed and --steps make another model than tiny-hybrid: give --to FOLDER")
    if asked.to is not None and asked.to.exists():
        parser.error(f"--to {asked.to}: it is there already; give a new folder")
    torch.set_num_threads(asked.threads)
    hf_logging.set_verbosity_error()  # it warns of each kernel that only CUDA has
    hf_logging.disable_progress_bar()
    if asked.to is None:
        made = tiny_hybrid()
    else:
        made = made_once(asked.to, lambda scratch: train(scratch, recipe, sections()))
    print(json.dumps({"folder": str(made), **json.loads((made / STAMP).read_text())}))


if __name__ == "__main__":
    main()
