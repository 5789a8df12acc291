"""Commands that ask a service, at one of mocked engines in this process."""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import Result
from typer.testing import CliRunner

from mallee.cli.demo.text import QUESTIONS
from mallee.cli.main import cli
from mallee.client import Mallee, NotFound
from mallee.protocol.errors import ConfigError, MalleeError
from support.fuzzing import CHATML
from support.mock_scene import CONFIG, make_folder, mock_config
from support.mock_stack import Stack, mock_stack
from support.waiting import until_asked


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = make_folder(tmp_path_factory.mktemp("model"))
    (made / "chat_template.jinja").write_text(CHATML)
    return made


@pytest.fixture
async def stack(folder: Path) -> AsyncIterator[Stack]:
    async with mock_stack(mock_config(folder, mock__engines_per_worker=2)) as made:
        yield made


async def beside(stack: Stack, talk: Callable[[str, Mallee], None]) -> None:
    """Run what waits for the service's answers, with its address and a client, in a thread of its own."""

    def work() -> None:
        with Mallee(stack.base_url) as client:
            talk(stack.base_url, client)

    await asyncio.to_thread(work)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, list(arguments))


async def test_capsules_are_listed_counted_and_deleted(stack: Stack) -> None:
    """F10, part: from the command line."""

    def talk(url: str, client: Mallee) -> None:
        def capsules(*arguments: str) -> Result:
            return run("capsules", *arguments, "--url", url)

        kept = client.prefill("a tree of many trunks")
        left = client.complete("from one root", max_tokens=3, n=2)
        client.prefill("mine", cache_salt="s")
        listed = json.loads(capsules("list", "--json").stdout)["capsules"]
        names = sorted([kept.id, *(str(branch.capsule) for branch in left)])
        assert [each["id"] for each in listed] == names
        table = capsules("list", "--pinned").stdout
        assert kept.id in table
        assert str(left[0].capsule) not in table
        assert len(json.loads(capsules("list", "--limit", "1", "--json").stdout)["capsules"]) == 1
        assert capsules("count", "--pinned").stdout == f"1 capsules of {kept.tokens} tokens\n"
        assert client.count_capsules(tier="device", pinned=False).count == 2
        assert isinstance(capsules("delete").exception, ConfigError)
        request = str(left[0].request_id)
        assert capsules("delete", "--request", request).stdout == "2 deleted\n"
        assert json.loads(capsules("delete", "--all", "--json").stdout) == {"deleted": 1}
        assert capsules("delete", "--all").stdout == "0 deleted\n"
        again = client.complete("from one root", max_tokens=3)
        again.fork(2, max_tokens=2).wait()
        assert capsules("prune", str(again.capsule)).stdout == "0 requests ended\n"
        assert [each.id for each in client.capsules()] == [again.capsule]
        again.pin().delete()
        assert json.loads(capsules("count", "--json", "--cache-salt", "s").stdout)["count"] == 1
        assert client.delete_capsules(all=True, cache_salt="s") == 1

    await beside(stack, talk)


async def test_workers_are_listed_and_one_is_drained(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """K28, part: by name, with the API key; the others go on."""
    key = "a-key-of-the-operator"
    monkeypatch.setenv("MALLEE_API_KEY", key)

    async def asked(stack: Stack, *arguments: str, key: str = key) -> Result:
        command = ["workers", *arguments, "--url", stack.base_url]
        return await asyncio.to_thread(CliRunner(env={"MALLEE_API_KEY": key}).invoke, cli, command)

    async with mock_stack(mock_config(folder, mock__engines_per_worker=3)) as stack:

        async def states() -> dict[str, str]:
            listed = json.loads((await asked(stack, "list", "--json")).stdout)["workers"]
            return {each["worker"]: each["state"] for each in listed}

        assert await states() == {f"w{i}": "ready" for i in range(3)}
        table = (await asked(stack)).stdout
        assert all(word in table for word in ("w0", "w1", "w2", "ready", "queue"))
        assert (await asked(stack, "drain", "w1")).stdout == "w1 drains\n"

        async def has_left() -> bool:
            return await states() == {"w0": "ready", "w2": "ready"}

        await until_asked(has_left)
        for arguments, used, message in (
            (("drain", "w9"), key, "no worker 'w9' here"),
            (("drain", "w0"), "other", "API key"),
        ):
            refused = await asked(stack, *arguments, key=used)
            assert isinstance(refused.exception, MalleeError)
            assert message in str(refused.exception)


async def test_the_fleet_is_shown_once_and_as_json(stack: Stack) -> None:
    def talk(url: str, client: Mallee) -> None:
        client.prefill("a tree of many trunks")
        shown = run("top", "--url", url, "--once").stdout.splitlines()
        assert shown[0] == "mallee ok  gateway g0, broker up, store up, 2 workers"
        assert shown[1].startswith("waiting 0  capsules 1")
        assert [line.split()[:2] for line in shown[3:]] == [["w0", "ready"], ["w1", "ready"]]
        assert all(len(line.rstrip()) <= 80 for line in shown)
        body = json.loads(run("top", "--url", url, "--json").stdout)
        assert (len(body["workers"]), body["health"]["status"], body["capsules"]) == (2, "ok", 1)

    await beside(stack, talk)


async def test_a_decision_is_explained_with_its_prices(stack: Stack) -> None:
    def talk(url: str, client: Mallee) -> None:
        branch = client.complete("a tree of many trunks", max_tokens=3)
        name = str(branch.request_id)
        told = run("explain", name, "--url", url).stdout
        assert f"{name} went to {branch.worker} (" in told
        assert "2 workers could take it" in told
        assert "its prompt was served as" in told
        assert told.splitlines()[-1].split()[:3] == ["0", "length", str(branch.worker)]
        assert name in run("explain", "--url", url).stdout
        body = json.loads(run("explain", name, "--url", url, "--json").stdout)
        assert body["data"][0]["worker"] == branch.worker
        refused = run("explain", "req_none", "--url", url)
        assert isinstance(refused.exception, NotFound)
        assert "not in the decision log" in str(refused.exception)

    await beside(stack, talk)


async def test_sessions_are_listed_shown_and_closed(stack: Stack) -> None:
    def talk(url: str, client: Mallee) -> None:
        def sessions(*arguments: str) -> Result:
            return run("sessions", *arguments, "--url", url)

        first = client.complete("a tree", max_tokens=2, session="bug-7")
        second = client.complete("a tree", max_tokens=2, session="bug-8")
        client.complete("a tree", max_tokens=2, session="[red]x")
        client.session("bug-7").fork("bug-7b")
        assert [line.split() for line in sessions("list").stdout.splitlines()[1:]] == [
            ["[red]x", "1", "0"], ["bug-7", "1", "0"], ["bug-7b", "bug-7", "1", "0"], ["bug-8", "1", "0"]
        ]  # fmt: skip
        assert "released" in sessions("close", "[red]x").stdout
        assert sessions("show", "bug-7b").stdout.splitlines()[0] == "bug-7b, below bug-7"
        everything = sessions("show").stdout
        assert everything.splitlines()[0] == "bug-7"
        assert str(first.capsule) in everything
        assert str(second.capsule) in everything
        # The terminal is none here: one look is all.
        assert sessions("show", "--live").stdout == everything
        body = json.loads(sessions("show", "--json").stdout)
        assert [each["id"] for each in body["sessions"]] == ["bug-7", "bug-7b", "bug-8"]
        for name in ("bug-7", "bug-7b", "bug-8"):
            assert "released" in sessions("close", name).stdout
        assert "no session" in sessions("show").stdout
        assert isinstance(sessions("show", "bug-7").exception, NotFound)

    await beside(stack, talk)


async def talk(stack: Stack, *lines: str, options: tuple[str, ...] = ()) -> Result:
    """These lines to `mallee chat`."""
    command = ["chat", "--url", stack.base_url, "--max-tokens", "6", *options]
    text = "\n".join(lines) + "\n"
    return await asyncio.to_thread(CliRunner().invoke, cli, command, text)


async def test_a_conversation_branches_and_is_drawn(stack: Stack) -> None:
    """Turns, forks, ways back, the tree; a question goes on from where it is asked."""

    asked = ("one", "/fork 2 two", "/go 1", "three", "/back 9", "four", "/tree", "/quit")
    answer = await talk(stack, *asked)
    assert answer.exit_code == 0, answer.output
    lines = answer.stdout.splitlines()
    tree = lines[lines.index("conversation") :]
    shape = [
        (len(line) - len(line.lstrip("│├└─ ")), line.lstrip("│├└─ ").split(" → ")[0])
        for line in tree[1:]
    ]
    assert shape == [
        *[(4, "1  one"), (8, "2  two"), (8, "3  two"), (8, "4  three"), (4, "5  four")]
    ]
    assert tree[5].endswith("◀")
    assert sum("◀" in line for line in tree) == 1
    assert "turn 1, 6 tokens, 0 cached" in answer.stdout
    forks = [line for line in lines if "computed" in line and line.startswith(("├", "└"))]
    assert [line.split()[-3:-1] for line in forks][1] == ["computed", "0"]  # it shares all


async def test_the_same_seed_gives_the_same_answer_again(stack: Stack) -> None:
    asked = ("tell", "/back", "tell", "/fork 2", "/tree")
    answer = await talk(stack, *asked, options=("--seed", "7", "--temperature", "1"))
    lines = answer.stdout.splitlines()
    tree = lines[lines.index("conversation") + 1 :]
    said = [line.split(" → ")[1].removesuffix(" ◀") for line in tree]
    assert len(said) == 4
    assert said[0] == said[1] == said[2]  # branch 0 of a fork draws as one alone
    assert said[3] != said[2]


async def test_mistakes_are_told_and_the_conversation_goes_on(stack: Stack) -> None:
    mistakes = ("/fork 2", "/fork x", "/fork 99 hi", "/go 7", "/back x", "/what", "hi", "/help")
    answer = await talk(stack, *mistakes)
    for told in (
        "there is no question yet",
        "/fork x: give a number",
        "/fork 99: give a number",
        "/go 7: give a turn, 0 to 0",
        "/back x: give a number",
        "/what: no such command",
    ):
        assert told in answer.stderr
    assert "turn 1, 6 tokens" in answer.stdout
    assert "/fork N [TEXT]" in answer.stdout
    too_long = await talk(stack, "a " * 5000, "hi")
    assert "tokens that this model serves" in " ".join(too_long.stderr.split())
    assert "turn 1, 6 tokens" in too_long.stdout


async def test_the_demo_forks_its_questions_and_searches(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """X1, part: what it tells of a service of mocked engines; Ray and the real model are the night's."""
    long = shutil.copytree(folder, tmp_path / "long")
    (long / "config.json").write_text(json.dumps({**CONFIG, "max_position_embeddings": 8192}))
    config = mock_config(long, mock__engines_per_worker=2, engine__kv_tokens=65536)
    async with mock_stack(config) as stack:
        started = SimpleNamespace(base_url=stack.base_url, start=lambda: None, close=lambda: None)
        monkeypatch.setattr("mallee.actors.local.LocalStack", lambda *_, **__: started)
        command = ["demo", "--model", str(long), "--max-tokens", "4", "--json"]
        answer = await asyncio.to_thread(CliRunner().invoke, cli, command)
    assert answer.exit_code == 0, answer.output
    report = json.loads(answer.stdout)
    fork, plain = report["fork"], report["plain"]
    assert len(fork["branches"]) == len(plain["branches"]) == len(QUESTIONS)
    assert fork["affinity"] == 1.0
    computed = [each["prefill_tokens"] > 200 for each in plain["branches"]]
    assert computed.count(True) == 2, "once by each of two servers"
    assert all(each["prefill_tokens"] < 200 < each["cached_tokens"] for each in fork["branches"])
    assert report["rewind"]["prefill_tokens"] <= report["rewind"]["endings"] * 16
    assert report["search"]
