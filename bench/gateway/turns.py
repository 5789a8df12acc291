"""CPU time of the gateway's text side for a turn that adds 50 words to a history which is sent whole.

    python -m bench.gateway.turns FOLDER [--tokens 1000 4000 ...]

FOLDER has a checkpoint's tokenizer and chat template. JSON, messages, template, tokens (all but the last
turn's are remembered) and block hashes, in milliseconds; beside them the floor, which is to decode the JSON
and do nothing else. The last line of stdout is one JSON object.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from bench.measure import machine
from mallee.actors.config import ChatSettings
from mallee.actors.http.chat.reading import ChatReader
from mallee.actors.http.prompts import PromptReader
from mallee.actors.http.schemas import ChatRequest, parse
from mallee.actors.text.chat import ChatTemplate
from mallee.actors.text.tokenizer import Tokenizer
from mallee.router.index.hashing import block_hashes, compile_hashing

BLOCK_SIZE = 16
WORDS = 300  # of a message of the history
ROUNDS = 9
MAX_VALUES = 1 << 20


class Turns:
    """Conversations of one model, with words of this repository's pages."""

    def __init__(self, folder: Path, words: list[str]) -> None:
        tokenizer = Tokenizer.load(folder)
        chat = ChatTemplate.load(  # with the protection of special tokens, as gateways have it
            folder,
            special_tokens=tokenizer.special_tokens,
            added_tokens=tokenizer.added_tokens,
        )
        prompts = PromptReader(tokenizer, chat, 1 << 30, max_model_len=1 << 30)
        self._reader = ChatReader(prompts, chat, tokenizer.added_tokens, ChatSettings())
        self._words = words
        self._rng = random.Random(1)
        self._messages: list[dict[str, Any]] = []

    def _add(self, num_words: int) -> None:
        for role in ("user", "assistant"):
            text = " ".join(self._rng.choice(self._words) for _ in range(num_words))
            self._messages.append({"role": role, "content": text})

    def grow(self, num_tokens: int) -> None:
        """Add messages until the history has so many tokens."""
        while self._length() < num_tokens:
            for _ in range(1 + (num_tokens - self._length()) // (8 * WORDS)):
                self._add(min(WORDS, num_tokens // 8))

    def _length(self) -> int:
        if not self._messages:
            return 0
        return len(self._reader.read(ChatRequest(messages=self._messages), "bench").prompt)

    def turn(self) -> dict[str, float]:
        """One more turn: its steps in milliseconds, and its prompt's tokens."""
        self._add(25)
        raw = json.dumps({"messages": self._messages[:-1]}).encode()
        spent: dict[str, float] = {}

        def timed(name: str, work: Callable[[], Any]) -> Any:
            begin = time.process_time()
            found = work()
            spent[name] = 1e3 * (time.process_time() - begin)
            return found

        request = timed("json", lambda: parse(raw, ChatRequest, MAX_VALUES))
        chat = timed("text", lambda: self._reader.read(request, "bench"))
        timed("hashes", lambda: block_hashes(chat.prompt, BLOCK_SIZE))
        total = sum(spent.values())
        timed("floor", lambda: msgspec.json.decode(raw))
        return {"tokens": len(chat.prompt), **spent, "total": total}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[1000, 4000, 16_000, 64_000, 200_000]
    )
    args = parser.parse_args()
    compile_hashing()
    page = Path(__file__).resolve().parents[2] / "docs" / "api.md"
    rows = []
    turns = Turns(args.folder, page.read_text().split())
    for num in sorted(args.tokens):
        turns.grow(num)
        found = [turns.turn() for _ in range(ROUNDS)]
        rows.append({k: round(statistics.median(f[k] for f in found), 3) for k in found[0]})
        sys.stderr.write(f"{rows[-1]}\n")
    sys.stdout.write(json.dumps({"turns": rows, "machine": machine()}) + "\n")


if __name__ == "__main__":
    main()
