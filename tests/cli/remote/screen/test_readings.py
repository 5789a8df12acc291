"""Figures over time, and the looks at sessions, by hand-computed cases."""

from typing import Any

from mallee.cli.remote.fleet import Answers, Sample
from mallee.cli.remote.screen.asking import MAX_TREES, PAGE, LiveService
from mallee.cli.remote.screen.load import NUM_LOOKS, History, spark
from support.scripted_service import ScriptedService


def sample(at: float, **totals: float) -> Sample:
    lines = [f'mallee_{name}{{gateway="g0"}} {value}' for name, value in totals.items()]
    return Sample.of(at, Answers({}, [], "\n".join(lines)))


def now(history: History) -> dict[str, str]:
    return {key: cells[1].plain for key, cells in history.rows()}


def test_a_line_is_as_high_as_its_share_of_the_highest() -> None:
    assert spark([0, 2, None, 7, 14]) == "▁▂ ▅█"
    assert spark([0, 0]) == "▁▁"
    assert spark([]) == ""


def test_rates_means_and_shares_are_of_the_time_between_two_looks() -> None:
    history = History()
    counters = {"cached_tokens_total": 10.0, "prefill_tokens_total": 10.0}
    history.add(sample(1.0, requests_waiting=3.0, output_tokens_total=100.0, **counters))
    assert now(history)["requests waiting"] == "3"
    assert now(history)["output tokens/s"] == "-"
    history.add(
        sample(
            3.0,
            output_tokens_total=500.0,
            cached_tokens_total=40.0,
            prefill_tokens_total=20.0,
            time_to_first_token_seconds_sum=0.5,
            time_to_first_token_seconds_count=10.0,
        )
    )
    shown = now(history)
    assert shown["output tokens/s"] == "200"
    assert shown["prompt tokens found, %"] == "75"
    assert shown["first token, ms"] == "50.0"
    assert shown["between tokens, ms"] == "-"


def test_only_the_last_looks_are_kept() -> None:
    history = History()
    for at in range(NUM_LOOKS + 5):
        history.add(sample(float(at), requests_waiting=float(at)))
    (waiting, *_) = history.rows()
    assert len(waiting[1][3].plain) == NUM_LOOKS


def listed(name: str, **more: Any) -> dict[str, Any]:
    base = {"parent": None, "created": 1, "last_used": 1, "capsules": 1, "running": 0}
    return {"id": name, **base, **more}


async def test_a_look_asks_for_a_bounded_number_of_trees_those_that_changed_first() -> None:
    sessions = [listed(f"s{i:03}") for i in range(100)]
    async with ScriptedService({"GET /v1/sessions": {"data": sessions}}) as service:
        for each in sessions:
            tree = {**each, "children": [], "nodes": []}
            service.answers[f"GET /v1/sessions/{each['id']}"] = tree
        service.answers["GET /health"] = {"status": "ok"}
        asking = LiveService(service.url, api_key=None)

        async def asked() -> set[str]:
            service.asked.clear()
            look = await asking.look(wants_sessions=True)
            assert look.sessions is not None
            assert look.sessions.answer is not None
            assert len(look.sessions.answer) == 100
            assert look.sessions.missing == PAGE
            return {path[-4:] for path in service.asked if "/sessions/" in path}

        seen = [await asked() for _ in range(7)]
        assert all(len(names) == MAX_TREES for names in seen)
        assert set().union(*seen) == {each["id"] for each in sessions}
        sessions[77] = listed("s077", running=1)
        assert "s077" in await asked()
        await asking.close()
