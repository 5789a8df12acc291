"""The bench of a turn's CPU time: it measures turns of a history that grows as asked."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench.gateway.turns import APIS, Gateway, History, measured
from mallee.actors.text.chat import ChatTemplate
from mallee.actors.text.tokenizer import Tokenizer
from support.mock_scene import TEXT, make_folder

CHAT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls %}"
    "<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}|{% endfor %}{{ tools }}<assistant>"
)


@pytest.mark.parametrize("is_agent", [False, True])
@pytest.mark.parametrize("api", APIS)
def test_turns_of_a_history_are_measured(tmp_path: Path, api: str, is_agent: bool) -> None:
    folder = make_folder(tmp_path)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT}))

    def load() -> Gateway:
        return Gateway(Tokenizer.load(folder), ChatTemplate.load(folder))

    rows: list[dict[str, Any]] = []
    for num in (0, 500):
        history = History(api, TEXT.split(), is_agent=is_agent)
        rows.append(measured(load, history, api, num, times=1))
    assert 0 < rows[0]["tokens"] < 500 <= rows[1]["tokens"]
    for row in rows:
        assert row["turn"] > 0
        assert row["first"] > 0
        assert row["messages"] >= 3
