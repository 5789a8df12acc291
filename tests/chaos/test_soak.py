"""Faults and hostile clients against processes, sockets, NATS and HTTP, as the benches play them."""

import json
from pathlib import Path

import pytest

from support.benches import run_bench
from support.mock_scene import make_folder

pytestmark = [pytest.mark.process, pytest.mark.nats, pytest.mark.slow]
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"


@pytest.fixture(scope="session")
def chat_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its tokenizer can chat."""
    made = make_folder(tmp_path_factory.mktemp("tiny"))
    (made / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    config = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 8192}))
    return made


@pytest.mark.timeout(400)
def test_whatever_fails_no_answer_is_wrong_and_nothing_is_left(chat_folder: Path) -> None:
    """K9, X5, X8, I26: each request ends once and right; then nothing is booked, held or open.

    Logs tell of each once, no counter goes back, and keys are broken, replaced, at their limit, expired.
    """
    found, table = run_bench("soak", "--quick", "--model", str(chat_folder), timeout_s=380)
    assert found["num_wrong"] == 0, table
    assert found["left"] == [], table
    assert found["num_faults"] >= 5, table
    assert found["ends"]["deck: equal"] > 200, table
    assert found["ends"]["fork: equal"] > 100, table
    assert found["ends"]["limited: 429"] > 0, table
    assert found["ends"]["ended key: 401"] == 4, table
    assert found["has_seen_broken_keys"], table
    assert found["scrapes"] > 60, table
    assert found["logged_requests"] > 500, table


def test_hostile_requests_and_clients_that_hang_up_leave_nothing(chat_folder: Path) -> None:
    """F30, part, I26: no 5xx but 503, an answer to each whole request, and nothing left open or booked."""
    found, table = run_bench(
        "soak.flood",
        *("--requests", "3000", "--disconnects", "300", "--model", str(chat_folder)),
    )
    assert found["num_wrong"] == found["tracebacks"] == 0, table
    assert found["left"] == [], table
    assert not found["has_ended"], table
    assert found["ends"]["fields: 400"] > 1000, table
