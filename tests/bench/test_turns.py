"""The bench of a turn's CPU time: it measures every step of a history that grows as asked."""

import json
from pathlib import Path

from bench.gateway.turns import Turns
from support.mock_scene import TEXT, make_folder

CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}|{% endfor %}<assistant>"


def test_a_turn_is_measured_step_by_step(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT}))
    turns = Turns(folder, TEXT.split())
    before = 0.0
    for num in (100, 2000):
        turns.grow(num)
        found = turns.turn()
        assert num <= found["tokens"] > before
        assert found["total"] == sum(found[each] for each in ("json", "text", "hashes"))
        before = found["tokens"]
