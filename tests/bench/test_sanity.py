"""The sanity script: it passes on tiny models, logs drafts by request, and names a feature that is wrong."""

import json
from typing import Any

import pytest

from bench.engine import sanity
from mallee.testing.random_model import random_model
from mallee.worker.model.config import FAMILIES

pytestmark = pytest.mark.usefixtures("one_thread")


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, list[str], Any]:
    """The exit status, the lines, and the object of the last one."""
    status = sanity.main(args)
    *lines, last = capsys.readouterr().out.splitlines()
    return status, lines, json.loads(last)


@pytest.mark.slow
def test_every_family_gives_the_plain_engine_s_answers_in_every_phase(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """I30: exit status 0 on tiny models, and a log of the drafts that each request accepted."""
    status, lines, report = run(capsys)
    assert (status, report["has_failed"]) == (0, False)
    assert list(report["models"]) == list(FAMILIES)
    for found in report["models"].values():
        assert found["differ"] == {phase: [] for phase in sanity.phases()}
        assert all(0 <= d["accepted"] <= d["drafted"] > 0 for d in found["requests"].values())
        assert any(drafts["accepted"] for drafts in found["requests"].values())
        for request, drafts in found["requests"].items():
            told = (
                f"  request {request}: {drafts['accepted']} of {drafts['drafted']} drafts accepted"
            )
            assert told in lines


def test_a_feature_that_changes_an_answer_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """I30, part: exit status 1, from the first phase on that has it: here pages, with other weights."""

    def maker(model: str) -> sanity.MakeForward:
        def make(size: int) -> Any:
            tiny = random_model(model, seed=size, max_position_embeddings=sanity.LENGTH)
            return tiny.forward(num_blocks=sanity.SLOTS // size, block_size=size)

        return make

    monkeypatch.setattr(sanity, "maker", maker)
    args = ("--models", "llama", "--phases", "plain,continuous,paged")
    status, lines, report = run(capsys, *args)
    assert (status, report["has_failed"]) == (1, True)
    differ = report["models"]["llama"]["differ"]
    assert not differ["plain"]
    assert not differ["continuous"]
    assert "g0.0" in differ["paged"]
    assert any(line.startswith("  paged        differs in g0.0") for line in lines)
