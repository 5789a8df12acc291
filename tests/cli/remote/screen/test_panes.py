"""The panes of `mallee top`: texts of its screen, at a service whose answers are given."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from textual.pilot import Pilot

from mallee.cli.remote.screen.app import Top
from mallee.cli.remote.screen.asking import LiveService
from support.screens import has, shown
from support.scripted_service import Answer, ScriptedService, error, worker
from support.waiting import elapse

REQUEST = "req_561337a4bdf3028b7bc6fb1dd9fe41570f5e8b57"
COUNTERS = """\
mallee_requests_waiting{gateway="g0"} 2.0
mallee_capsules{gateway="g0"} 7.0
mallee_output_tokens_total{gateway="g0"} 900.0
"""


HEALTH = {"status": "ok", "gateway": "g0", "broker": "up", "store": "up", "workers": [{}, {}]}
LIFE = {
    "object": "request.life",
    "prepare_s": 0.001,
    "cache": {"served": "fork", "reason": None},
    "branches": [
        {
            **{"state": "length", "worker": "w0", "prompt": "found", "cached_tokens": 64},
            **{"prefill_tokens": 0, "output_tokens": 16, "tokens_per_s": 100.0},
            **{"first_token_s": 0.01, "end_s": 0.16, "moves": 0, "placed_s": 0.002},
        }
    ],
}
FREE = {f"{term}_s": 0.0 for term in ("queued", "prefill", "fetch", "displaced", "pull")}
PLACED = {"eligible": True, "matched_blocks": 4, "pulled_blocks": 0, **FREE, "decode_s": 0.02}
DECISION = {
    **{"object": "route.decision", "num_blocks": 4, "rows": 1},
    **{"number": 3, "request": REQUEST, "worker": "w0", "reason": "cost", "prompt_tokens": 64},
    "num_candidates": 2,
    "candidates": [
        {**PLACED, "worker": "w0", "overlap_blocks": 4, "total": 0.0213},
        {**PLACED, "worker": "w1", "overlap_blocks": 0, "prefill_s": 0.03, "total": None},
    ],
    "spill": {"how": "stay", "wait_s": 0.02, "migrate_s": 0.05, "recompute_s": 0.07},
}


def script(**more: Answer) -> dict[str, Answer]:
    """All that the panes ask for."""
    workers = [worker("w1", state="suspect"), worker("w0")]
    return {
        "GET /health": HEALTH,
        "GET /v1/router/workers": listed(*workers),
        "GET /metrics": COUNTERS,
        "GET /v1/router/explain": lambda: {**listed(DECISION), "life": LIFE},
        **more,
    }


def listed(*data: Any) -> dict[str, Any]:
    return {"object": "list", "data": data}


@asynccontextmanager
async def opened(
    answers: dict[str, Answer], *, timeout_s: float = 5.0, height: int = 22
) -> AsyncIterator[tuple[Top, Pilot[None], ScriptedService]]:
    async with ScriptedService(answers) as service:
        asking = LiveService(service.url, api_key=None, timeout_s=timeout_s)
        app = Top(asking, interval_s=0.2)
        async with app.run_test(size=(96, height), notifications=True) as pilot:
            yield app, pilot, service


def body(lines: list[str]) -> list[str]:
    """Between the tabs and the keys, without empty lines."""
    return [line for line in lines[4:-1] if line]


async def test_workers_are_shown_below_the_state_of_the_service() -> None:
    """X12, part: the whole screen as text."""
    async with opened(script()) as (app, pilot, _):
        lines = await shown(app, pilot, has("███░░░░░░░  30%", "answers/s"))
    assert [line for line in lines if line] == [
        " mallee ok  gateway g0, broker up, store up, 2 workers",
        " waiting 2  capsules 7  output tokens/s 0  prompt tokens/s 0  answers/s 0",
        " 1 workers  2 cache  3 load  4 requests",
        "╸━━━━━━━━━╺" + "━" * 85,
        " worker  state    KV in use        rows  queue  prefill  cached  lease  weights  device  cache",
        " w0      ready    ███░░░░░░░  30%     3      1        5       9  0.5 s  base",
        " w1      suspect  ███░░░░░░░  30%     3      1        5       9  0.5 s  base",
        " r Refresh  d Dark or light  q Quit",
    ]


async def test_the_cache_is_told_by_tier_load_over_time_and_requests_with_their_prices() -> None:
    async with opened(script(), height=30) as (app, pilot, _):
        await pilot.press("2")
        lines = body(await shown(app, pilot, has("all ")))
        assert [line.split() for line in lines] == [
            [*("worker", "device", "in", "use", "blocks", "live", "cached", "host", "disk"),
             *("moved", "down", "fetched", "dropped", "found")],
            ["all", "██████░░░░", "65%", "200", "130", "15", "40", "14", "16", "8", "8", "38%"],
            ["w0", "████░░░░░░", "40%", "100", "40", "12", "20", "7", "8", "4", "4", "75%"],
            ["w1", "█████████░", "90%", "100", "90", "3", "20", "7", "8", "4", "4", "0%"],
        ]  # fmt: skip
        await pilot.press("3")
        lines = await shown(app, pilot, has("requests waiting", "███"))
        (waiting,) = (line.split() for line in lines if "requests waiting" in line)
        assert waiting[2:4] == ["2", "2"]
        assert set(waiting[4]) == {"█"}
        await pilot.press("4")
        lines = body(await shown(app, pilot, has("went to w0", "served as fork")))
        row = ["req_561337a4…", "w0", "cost", "64", "4", "21.3", "2", "stay"]
        assert lines[1].split() == row
        told = [line.split() for line in lines]
        assert ["w1", "0", "0", "0.0", "30.0", "20.0", "0.0", "0.0", "0.0", "-"] in told


async def test_a_plain_key_is_told_what_it_lacks() -> None:
    refused = (403, error("this path needs an operator's key", "forbidden"))
    paths = ("GET /v1/router/workers", "GET /metrics", "GET /v1/router/explain")
    async with opened(script(**dict.fromkeys(paths, refused))) as (app, pilot, _):
        await shown(app, pilot, has("mallee ok", "this needs an operator's key"))
        await pilot.press("4")
        await shown(app, pilot, has("this needs an operator's key"))


async def test_a_service_that_goes_away_is_told_and_comes_back() -> None:
    answers = script()
    async with opened(answers) as (app, pilot, service):
        await shown(app, pilot, has("w0"))
        await service.stop()
        lines = await shown(app, pilot, has("no answer from", "what is shown is older"))
        assert has("w0", "mallee ok")(lines)
        answers["GET /v1/router/workers"] = listed(worker("w7"))
        await service.start()
        lines = await shown(app, pilot, has("w7"))
        assert not has("no answer from")(lines)
        assert not has("w0")(lines)


@pytest.mark.slow
async def test_nonsense_of_a_service_is_told() -> None:
    answers = script()
    async with opened(answers) as (app, pilot, _):
        await shown(app, pilot, has("w0"))
        for path, nonsense, claim in (
            ("GET /v1/router/workers", listed({"worker": 3}), "not a WorkerList"),
            ("GET /v1/router/workers", "<html>", "without JSON"),
            ("GET /health", "<html>", "HTTP 200 without JSON"),
            ("GET /health", {"hello": "world"}, "not Mallee's answer"),
        ):
            before, answers[path] = answers[path], nonsense
            await shown(app, pilot, has(claim))
            answers[path] = before
            await shown(app, pilot, lambda lines, claim=claim: not has(claim)(lines))  # type: ignore[misc]


async def test_a_service_that_hangs_blocks_no_key_and_no_end() -> None:
    """A look is given up after its limit."""
    answers = script()

    async def hang() -> dict[str, Any]:
        await elapse(20)
        return HEALTH

    async with opened(answers, timeout_s=0.3) as (app, pilot, _):
        await shown(app, pilot, has("w0"))
        answers["GET /health"] = hang
        await shown(app, pilot, has("nothing within 0.3 s"))
        async with asyncio.timeout(5):
            await pilot.press("2")
            await shown(app, pilot, has("moved down"))
        dark = app.current_theme.dark
        await pilot.press("d")
        assert app.current_theme.dark is not dark
        await pilot.press("q")
        assert app.return_code == 0
