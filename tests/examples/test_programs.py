"""The short programs of docs/cookbook.md, each as it stands there, over a tiny model: its texts are noise."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from anyio.to_thread import run_sync

from bench.doubles.random_model import random_model
from bench.doubles.structures import MockMatcher, MockStructures
from mallee.api.text.chat import ChatTemplate
from mallee.api.text.families import FAMILIES
from support.file_server import file_server
from support.langgraph_stand_in import stand_in
from support.tiny_fleet import tiny_api

pytestmark = pytest.mark.real_time  # programs have threads and loops of their own

PAGE = Path(__file__).resolve().parents[2] / "docs" / "cookbook.md"
URL = "http://127.0.0.1:8000"
MODEL = random_model("llama", 5, max_position_embeddings=4096, eos_token_id=0)
FOUND = re.findall(r"^### (.+?)\n.*?^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S)
PROGRAMS = dict(FOUND[:12])
VERDICT = b'{"allowed": true, "certain": "no"}\x00'


class Verdicts(MockStructures):
    """Has each answer be the same verdict."""

    def compile(self, grammar: Any) -> MockMatcher:
        return MockMatcher([tuple(VERDICT[:-1])])


def test_twelve_programs_have_at_most_15_lines() -> None:
    assert len(PROGRAMS) == 12
    for name, code in PROGRAMS.items():
        assert len([line for line in code.splitlines() if line.strip()]) <= 15, name


def numbers(text: str) -> list[int]:
    return [int(each) for each in re.findall(r"^\d+", text, re.M)]


SAYS: dict[str, Any] = {
    "Best of 8 with a verifier": lambda out, _: 0 <= float(out.split()[0]) <= 1,
    'ReAct, forked at "Observation:"': lambda out, _: numbers(out)[0] > 60,
    "A tree of thoughts, with both clients": lambda out, _: out[: len(out) // 2] * 2 == out,
    # Texts are drawn, and may have numbers: the first line's, and the last answer's.
    "A response, forked three ways": lambda out, names: (
        min(numbers(out)[0], names["answer"].usage.input_tokens_details.cached_tokens) > 30
    ),
    "Tools, described once": lambda out, _: min(numbers(out)) > 100,
    "Branches of LangGraph": lambda out, names: len(eval(out)["notes"]) == 3,
    "Answers as values": lambda out, _: out == "True no\nTrue no\n",
    "Map and reduce over a list": lambda out, names: len(names["result"].nodes) == 7,
    "A search by a function of yours": lambda out, _: float(out.split()[0]) < 0,
    "Sixteen rollouts, with ids": lambda out, names: len({*map(id, names["group"])}) == 16,
    "Export and import": lambda out, _: numbers(out)[0] > 1000 and numbers(out)[1] == 340,
    "A tree in a notebook": lambda out, names: (
        "├── " in out and "└── " in out and "<div" in names["tree"]._repr_html_()
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
async def test_a_program_runs_as_it_stands(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    if "langgraph" in PROGRAMS[name]:
        for module, made in stand_in().items():
            monkeypatch.setitem(sys.modules, module, made)
    names: dict[str, Any] = {}

    def run(url: str) -> None:
        code = PROGRAMS[name].replace(URL, url)
        monkeypatch.setattr("mallee.client.aio.AsyncMallee.__init__.__defaults__", (url,))
        monkeypatch.setattr("mallee.client.sync.Mallee.__init__.__defaults__", (url,))
        exec(compile(code, name, "exec"), names)
        if "client" in names:
            names["client"].close()

    if "export" in PROGRAMS[name]:
        async with file_server(tmp_path) as server:
            await run_sync(run, server.url)
        assert SAYS[name](capsys.readouterr().out, names)
        return
    settings = {"chat": ChatTemplate(None, family=FAMILIES[0])}
    structures = Verdicts(MODEL.forward(num_blocks=2).spec.vocab_size, (0,))
    options: Any = {"structures": lambda: structures} if "BaseModel" in PROGRAMS[name] else {}
    async with tiny_api(MODEL, 1, num_blocks=4096, settings=settings, **options) as (http, _):
        await run_sync(run, str(http.base_url))
    assert SAYS[name](capsys.readouterr().out, names)
