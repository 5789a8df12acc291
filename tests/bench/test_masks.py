"""The bench of grammar masks, over a tiny vocabulary and model."""

import json
import shutil
from pathlib import Path

from bench.engine.masks import GRAMMARS, ROWS, STEPS, mask_times, overhead
from mallee.testing.random_model import random_model
from support.grammar_lab import train

ROOT = Path(__file__).parents[2]


def test_every_mask_on_the_way_through_a_text_is_timed(tmp_path: Path) -> None:
    """D10, part, I16, part: by grammar; a mask that forbids the text's own token fails the bench."""
    train(tmp_path / "tokenizer.json")
    found = mask_times(tmp_path / "tokenizer.json", 2)
    assert set(found["grammars"]) == set(GRAMMARS)
    for each in (*found["grammars"].values(), found["all"]):
        assert 0 < each["p50_us"] <= each["p99_us"] <= each["max_us"]
    assert set(found["rows_us"]) == set(map(str, ROWS))


def test_constrained_steps_are_timed_beside_free_ones(tmp_path: Path) -> None:
    """D10, part: answers of equal length, every token of the one kind a letter."""
    inner = train(tmp_path / "t.json")
    size = inner.get_vocab_size()
    random_model(vocab_size=size, eos_token_id=inner.token_to_id("<end>")).save(tmp_path / "m")
    shutil.move(tmp_path / "t.json", tmp_path / "m" / "tokenizer.json")
    found = overhead(str(tmp_path / "m"), rounds=1, num=6, threads=1)
    assert set(found) == {"1", "8"}
    assert all(set(kinds) == set(STEPS) for kinds in found.values())
    assert all(step["ms"] > 0 for kinds in found.values() for step in kinds.values())


def test_a_mask_over_129_thousand_tokens_takes_less_than_a_tenth_of_a_millisecond() -> None:
    """D10, part, I16, part: committed figures: p50 and mean; constrained steps cost 5 %, counted ones 15."""
    found = json.loads((ROOT / "bench" / "results" / "masks.json").read_text())
    large = [each for each in found["tokenizers"].values() if each["vocab_size"] > 100_000]
    assert large
    for each in large:
        assert each["all"]["p50_us"] < each["all"]["mean_us"] < 100
        assert each["share_of_8b_step"]["1"] < 0.05
    for kinds in found["steps"].values():
        assert kinds["constrained"]["overhead"] < 0.05
        assert kinds["counted"]["overhead"] < 0.15
