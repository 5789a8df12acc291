"""Sessions recorded over HTTP on a tiny real model, and replayed on a fresh engine; records of tenants."""

from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from msgspec import structs
from msgspec.structs import replace

from bench.doubles.random_model import random_model
from mallee.mocker.passes import mock_spec
from mallee.protocol.hashing import as_tokens
from mallee.protocol.ids import Scope
from mallee.protocol.messages import Fork, Generate, Limits
from mallee.protocol.model import WeightVersion
from mallee.router.config import RouterConfig
from mallee.router.dispatch.jobs import GenerateJob, QueueTerms
from mallee.sessions.episode import episode_of, record_of
from mallee.sessions.record import Asked, Got, Manifest, Opened, Placed, read
from support import tiny_fleet
from support.live_api import served
from support.live_fleet import LiveFleet, lose, running
from support.recording import SESSION, bad, changed, recorder_in, replayed
from support.tiny_fleet import chunks_of, tiny_api
from support.waiting import elapse, until

pytestmark = pytest.mark.usefixtures("one_thread")

MODEL = random_model("llama", 5, max_position_embeddings=2048)
SPEC = MODEL.forward(num_blocks=2).spec
PROMPT = "".join(chr(33 + 7 * i % 90) for i in range(50))
SAMPLED = {"ignore_eos": True, "seed": 3, "temperature": 1.0, "frequency_penalty": 0.5}
RECORD = "/v1/sessions/s/record"


def api(
    folder: Path | None, gateways: int = 1, **options: Any
) -> AbstractAsyncContextManager[tuple[httpx.AsyncClient, LiveFleet]]:
    """Gateways and two workers; a server in front of the first gateway."""
    recorder = None if folder is None else recorder_in(folder, SPEC, **options)
    return tiny_api(MODEL, 2, gateways=gateways, make_recorder=recorder, syncs=gateways > 1)


async def post(client: httpx.AsyncClient, path: str, **body: Any) -> dict[str, Any]:
    return await tiny_fleet.post(client, path, mallee=SESSION, **body)


async def complete(client: httpx.AsyncClient, prompt: str = PROMPT, **options: Any) -> list[Any]:
    answer = await post(client, "/v1/completions", prompt=prompt, **{**SAMPLED, **options})
    choices: list[Any] = answer["choices"]
    return choices


def files_in(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


def again(raw: bytes) -> list[Any]:
    return replayed(raw, MODEL.forward(num_blocks=1024))


async def tree(client: httpx.AsyncClient, fleet: LiveFleet) -> None:
    """A session with all that a client can do to an answer."""
    root = await post(client, "/v1/capsules", prompt=PROMPT)
    fork = f"/v1/capsules/{root['id']}/fork"
    await post(client, fork, n=3, max_tokens=12, **SAMPLED)
    tools = await post(client, fork, suffixes=["tool: a", "b"], max_tokens=20, **SAMPLED)
    left = tools["choices"][1]["mallee"]["capsule"]
    await post(client, f"/v1/capsules/{left}/fork", suffixes=["go on"], max_tokens=9, temperature=0)
    many = await complete(client, n=4, max_tokens=30, logprobs=2)
    stop = many[1]["text"][9:12]
    cut = (await complete(client, n=2, max_tokens=40, stop=stop))[1]["mallee"]
    after = f"/v1/capsules/{cut['capsule']}"
    await post(client, f"{after}/fork", suffixes=["Observation"], max_tokens=9, **SAMPLED)
    await post(client, f"{after}/restore", max_tokens=7)
    at = len(PROMPT) + 13
    rewound = await post(client, f"/v1/capsules/{many[2]['mallee']['capsule']}/rewind", to=at)
    await post(client, f"/v1/capsules/{rewound['id']}/restore", max_tokens=9)
    twice = await post(client, f"/v1/capsules/{rewound['id']}/rewind", to=at - 4)
    await post(client, f"/v1/capsules/{twice['id']}/fork", n=2, max_tokens=5, **SAMPLED)
    body = {"prompt": PROMPT, **SAMPLED, "max_tokens": 300, "stream": True, "mallee": SESSION}
    captured, num, host = None, 0, None
    async with client.stream("POST", "/v1/completions", json={**body, "n": 2}) as response:
        async for chunk in chunks_of(response):
            num += len(chunk["choices"][0]["text"])
            if captured is None and num > 20:
                path = f"/v1/requests/{chunk['id']}/capsules"
                captured = await post(client, path, branch=1, ttl_s=60)
            elif host is None and num > 60:
                host = await lose(fleet, response.headers["x-mallee-worker"])
    assert captured is not None
    assert host is not None
    await post(client, f"/v1/capsules/{captured['id']}/restore", max_tokens=11)
    async with client.stream("POST", "/v1/completions", json=body) as response:
        await anext(chunks_of(response))  # and hangs up
    await until(lambda: not fleet.gateways[0].requests.num_in_flight)
    await host.close()


@pytest.mark.slow
async def test_a_session_of_many_branches_is_replayed_token_by_token(tmp_path: Path) -> None:
    """F25, F21: forks, n, stop strings, captures, rewinds, a hang-up, a dead worker; over HTTP and back."""
    async with api(tmp_path) as (client, fleet):
        await tree(client, fleet)
        await client.post("/v1/completions", json={"prompt": "not recorded", "max_tokens": 2})
        answer = await client.get(RECORD)
        assert answer.status_code == 200
    raw = answer.content
    entries = read(raw).entries
    assert not any(isinstance(entry, Manifest) for entry in entries)
    moves = [entry for entry in entries if isinstance(entry, Placed) and entry.is_moved]
    assert moves
    outcomes = again(raw)
    assert bad(outcomes) == []
    assert len(outcomes) == 13
    num_tokens = sum(len(e.tokens) // 4 for e in entries if isinstance(e, Got))
    assert sum(each.num_tokens for each in outcomes) == num_tokens > 800
    [file] = files_in(tmp_path)
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.read_bytes() == raw
    # the same as arrays
    episode = tmp_path / "episode.npz"
    episode.write_bytes(episode_of(raw))
    with np.load(episode, allow_pickle=False) as arrays:
        assert len(arrays["tokens"]) == num_tokens == arrays["offsets"][-1]
        assert len(arrays["times"]) == num_tokens
        num_rows = len(arrays["offsets"]) - 1
        for name in ("parents", "boundaries", "seeds", "ends", "asked", "workers", "requests"):
            assert len(arrays[name]) == num_rows, name
        assert set(arrays["ends"]) == {"stop", "length", "cut", "given up"}
        assert np.sum(arrays["parents"] >= 0) == 12
        assert np.isfinite(arrays["logprobs"]).sum() == 129
        assert (arrays["parents"] < np.arange(num_rows)).all()
    assert record_of(episode.read_bytes()) == raw


async def test_what_differs_is_named_with_branch_and_step(tmp_path: Path) -> None:
    """F25: another seed, other weights, an end that was none."""
    async with api(tmp_path) as (client, _):
        first = await complete(client, n=3, max_tokens=20)
        left = first[1]["mallee"]["capsule"]
        await post(client, f"/v1/capsules/{left}/fork", n=1, max_tokens=5, **SAMPLED)
        await complete(client, "independent", max_tokens=5)
        raw = (await client.get(RECORD)).content
    whole = again(raw)
    assert bad(whole) == []

    def reseed(entry: Any) -> Any:
        if isinstance(entry, Asked) and isinstance(entry.command, Generate) and not entry.number:
            sampling = replace(entry.command.sampling, seed=4)
            return replace(entry, command=replace(entry.command, sampling=sampling))
        return entry

    outcomes = again(changed(raw, reseed))
    assert {each.branch for each in outcomes[0].divergences} == {0, 1, 2}
    assert [each.verdict for each in outcomes] == ["diverged", "left out", "equal"]
    assert "diverged" in outcomes[1].reason
    first = outcomes[0].divergences[0]
    expected = whole[0].request.branches[first.branch].tokens
    assert (first.request, first.position) == (whole[0].request.name, len(PROMPT) + first.step)
    assert first.before == tuple(expected[: first.step])
    other = random_model("llama", 6, max_position_embeddings=2048)
    outcomes = replayed(raw, other.forward(num_blocks=1024))
    assert [each.verdict for each in outcomes] == ["diverged", "left out", "diverged"]
    assert all(each.step < 5 for each in outcomes[0].divergences)

    def shorten(entry: Any) -> Any:
        if isinstance(entry, Got) and entry.finish == "length" and entry.number == 2:
            return replace(entry, finish="stop")
        return entry

    [found] = again(changed(raw, shorten))[2].divergences
    assert (found.step, found.expected, found.got) == (5, "its end (stop)", "its end (length)")


async def test_capsules_of_before_are_in_the_record_as_text(tmp_path: Path) -> None:
    """F25: the record begins late; its first forks continue what is not in it, a branch's rest included."""
    async with api(tmp_path) as (client, _):
        answer = await client.post(
            "/v1/completions",
            json={"prompt": PROMPT, **SAMPLED, "max_tokens": 30},
        )
        left = answer.json()["choices"][0]["mallee"]["capsule"]
        await post(client, f"/v1/capsules/{left}/fork", n=2, max_tokens=9, **SAMPLED)
        await post(client, f"/v1/capsules/{left}/restore", at=len(PROMPT) + 9, max_tokens=9)
        raw = (await client.get(RECORD)).content
    kinds = [type(entry) for entry in read(raw).entries]
    assert kinds.count(Manifest) == 1
    assert bad(again(raw)) == []


async def test_two_gateways_record_two_parts_of_one_session(tmp_path: Path) -> None:
    """F25: each in a file of its own; together they are one record, and each alone is, too."""
    async with (
        api(tmp_path, gateways=2) as (client, fleet),
        served(fleet.gateways[1]) as (url, _),
        httpx.AsyncClient(base_url=url, timeout=30) as other,
    ):
        first = await complete(client, n=2, max_tokens=8)
        path = f"/v1/capsules/{first[1]['mallee']['capsule']}/fork"
        second = await post(other, path, suffixes=["x"], max_tokens=8, **SAMPLED)
        path = f"/v1/capsules/{second['choices'][0]['mallee']['capsule']}/fork"
        await post(client, path, n=1, max_tokens=8, **SAMPLED)
        await other.get(RECORD)
        raw = (await client.get(RECORD)).content
    parts = files_in(tmp_path)
    assert len(parts) == 2
    assert b"".join(part.read_bytes() for part in parts) == raw
    outcomes = again(raw)
    assert bad(outcomes) == []
    assert [type(each.request.command) for each in outcomes] == [Generate, Fork, Fork]
    for part in parts:
        assert bad(again(part.read_bytes())) == []


async def test_a_record_that_was_deleted_at_another_gateway_begins_again(tmp_path: Path) -> None:
    """F25: the other one's next request finds its part gone, the one after that is recorded."""
    async with (
        api(tmp_path, gateways=2) as (client, fleet),
        served(fleet.gateways[1]) as (url, _),
        httpx.AsyncClient(base_url=url, timeout=30) as other,
    ):
        await complete(other, max_tokens=4)
        await other.get(RECORD)  # it is written
        assert (await client.delete(RECORD)).status_code == 200
        assert (await other.get(RECORD)).status_code == 404
        await complete(other, max_tokens=4, seed=1)
        assert (await other.get(RECORD)).status_code == 404
        await complete(other, max_tokens=4, seed=2)
        raw = (await other.get(RECORD)).content
    assert [each.request.command.sampling.seed for each in again(raw)] == [2]


async def test_a_record_is_refused_where_it_can_not_be(tmp_path: Path) -> None:
    async with api(None) as (client, _):
        for extras in (SESSION, {"record": True}):
            answer = await client.post("/v1/completions", json={"prompt": "a", "mallee": extras})
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == "mallee.record"
        assert (await client.get(RECORD)).status_code == 400


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["session_bytes", "sessions", "disk", "gone"])
async def test_a_record_that_can_not_go_on_ends_and_requests_do_not(
    tmp_path: Path, fault: str
) -> None:
    """F25: too long, too many, no disk: counted; what is there is replayed. Deleted beneath: begun again."""
    stopped: list[str] = []
    most = {"session_bytes": 64, "sessions": 0, "disk": 64, "gone": 64}[fault]
    nbytes = 2500 if fault == "session_bytes" else 1 << 20
    folder = tmp_path / "records"
    options = {"most": most, "max_nbytes": nbytes, "count_stopped": stopped.append}
    async with api(folder, **options) as (client, _):
        if fault == "disk":
            folder.rmdir()
            folder.write_text("a file")
        for number in range(3):
            [choice] = await complete(client, max_tokens=30, seed=number)
            assert len(choice["text"]) == 30
            if fault == "gone" and not number:
                await client.get(RECORD)
                for part in files_in(folder):
                    part.unlink()
            await elapse(0.1)
        answer = await client.get(RECORD)
        assert answer.status_code == (200 if fault in ("session_bytes", "gone") else 404)
        shown = (await client.get("/metrics")).text
        assert "mallee_session_records_stopped" in shown
    assert set(stopped) == (set() if fault == "gone" else {fault})
    if fault == "session_bytes":
        assert len(stopped) == 1
        outcomes = again(answer.content)
        assert bad(outcomes) == []
        assert 0 < sum(each.num_tokens for each in outcomes) < 90
        assert len(answer.content) < 2500 + 100


WEIGHTS = WeightVersion(3, "step-30", "/srv/models/step-30", "d1ge57")
VERSIONED = structs.replace(mock_spec(max_model_len=512), weights=WEIGHTS)
TOKENS = as_tokens(range(40))


def job(tenant: str, session: str) -> GenerateJob:
    terms = QueueTerms(tenant, session=session, owner=tenant, is_recorded=True)
    limits = Limits(4, ignore_eos=True)
    return GenerateJob(TOKENS, limits, scope=Scope(f"of {tenant}"), terms=terms)


async def test_a_tenant_fills_its_own_parts_and_no_record_has_a_path_of_the_server(
    tmp_path: Path,
) -> None:
    """F25, F7, part: `acme` asks for five records, and has two; `other` gets its own all the same."""
    stopped: list[str] = []
    options = {"most": 8, "most_each": 2, "count_stopped": stopped.append}
    recorder = recorder_in(tmp_path, VERSIONED, **options)
    made = LiveFleet(VERSIONED, RouterConfig(block_size=4), make_recorder=recorder)
    async with running(made, 1) as fleet:
        gateway = fleet.gateways[0]

        async def ask(tenant: str, session: str) -> bytes:
            async for _ in await gateway.requests.start(job(tenant, session)):
                pass
            if session in ("3", "4", "5"):
                await elapse(0.1)
                return b""
            return await gateway.requests.recorder.read(Scope(f"of {tenant}"), session)

        acme = [await ask("acme", str(i)) for i in range(1, 6)]
        other = [await ask("other", str(i)) for i in (1, 2)]
        assert [bool(raw) for raw in acme] == [True, True, False, False, False]
        assert all(other)
        assert set(stopped) == {"tenant_sessions"}
        await gateway.requests.recorder.delete(Scope("of acme"), "1")
        again = await ask("acme", "6")
        assert again, "a part that was deleted makes room for another"
    for raw in (*acme[:2], *other, again):
        assert b"/srv" not in raw
        entries = read(raw).entries
        weights = [e.weights for e in entries if isinstance(e, Asked | Placed)]
        weights += [e.model.weights for e in entries if isinstance(e, Opened)]
        assert len(weights) >= 3
        assert {(each.label, each.digest, each.path) for each in weights} == {
            ("step-30", "d1ge57", "")
        }
