"""Commands and the SDK at a running service of mocked engines."""

import asyncio
import json
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from mallee.actors.addresses import free_port
from mallee.actors.mock.stack import MockStack
from mallee.cli.main import cli
from mallee.client import Mallee, NotFound
from mallee.protocol.errors import ConfigError
from support.brokers import OpenBroker
from support.mock_scene import make_folder, mock_config
from support.waiting import until

pytestmark = pytest.mark.process

KEY = "a-key-of-the-operator"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, list(arguments))


async def asked(stack: MockStack, *arguments: str, key: str = KEY) -> Result:
    command = ["workers", *arguments, "--url", stack.base_url]
    runner = CliRunner(env={"MALLEE_API_KEY": key})
    return await asyncio.to_thread(runner.invoke, cli, command)


def capsules(url: str, *arguments: str) -> Result:
    return run("capsules", *arguments, "--url", url)


def test_capsules_are_listed_counted_and_deleted(url: str, client: Mallee) -> None:
    """F10, part: from the command line."""
    kept = client.prefill("a tree of many trunks")
    left = client.complete("from one root", max_tokens=3, n=2)
    client.prefill("mine", cache_salt="s")
    listed = json.loads(capsules(url, "list", "--json").stdout)["capsules"]
    names = sorted([kept.id, *(str(branch.capsule) for branch in left)])
    assert [each["id"] for each in listed] == names
    table = capsules(url, "list", "--pinned").stdout
    assert kept.id in table
    assert str(left[0].capsule) not in table
    assert len(json.loads(capsules(url, "list", "--limit", "1", "--json").stdout)["capsules"]) == 1
    counted = capsules(url, "count", "--pinned")
    assert counted.stdout == f"1 capsules of {kept.tokens} tokens\n"
    assert client.count_capsules(tier="device", pinned=False).count == 2
    refused = capsules(url, "delete")
    assert isinstance(refused.exception, ConfigError)
    assert capsules(url, "delete", "--request", str(left[0].request_id)).stdout == "2 deleted\n"
    assert json.loads(capsules(url, "delete", "--all", "--json").stdout) == {"deleted": 1}
    assert capsules(url, "delete", "--all").stdout == "0 deleted\n"
    assert json.loads(capsules(url, "count", "--json", "--cache-salt", "s").stdout)["count"] == 1
    assert client.delete_capsules(all=True, cache_salt="s") == 1


def talk(url: str, *lines: str, options: tuple[str, ...] = ()) -> Result:
    command = ["chat", "--url", url, "--max-tokens", "6", *options]
    return CliRunner().invoke(cli, command, input="\n".join(lines) + "\n")


async def test_workers_are_listed_and_one_is_drained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """K28, part: by name, with the API key; the others go on."""
    monkeypatch.setenv("MALLEE_API_KEY", KEY)
    config = mock_config(make_folder(tmp_path), mock__engines_per_worker=3)
    async with MockStack(config, port=free_port()) as stack:
        listed = json.loads((await asked(stack, "list", "--json")).stdout.splitlines()[-1])[
            "workers"
        ]
        assert {(each["worker"], each["state"]) for each in listed} == {
            (f"w{i}", "ready") for i in range(3)
        }
        table = (await asked(stack)).stdout
        assert all(word in table for word in ("w0", "w1", "w2", "ready", "queue"))
        assert (await asked(stack, "drain", "w1")).stdout == "w1 drains\n"
        await until(lambda: {view.worker for view in stack.router.all_workers()} == {"w0", "w2"})
        for arguments, key, message in (
            (("drain", "w9"), KEY, "no worker 'w9' here"),
            (("drain", "w0"), "other", "API key"),
        ):
            refused = await asked(stack, *arguments, key=key)
            assert isinstance(refused.exception, ConfigError)
            assert message in str(refused.exception)


def test_the_fleet_is_shown_once_and_as_json(url: str, client: Mallee) -> None:
    client.prefill("a tree of many trunks")
    shown = run("top", "--url", url, "--once").stdout.splitlines()
    assert shown[0] == "mallee ok  gateway g0, broker up, 2 workers"
    assert shown[1].startswith("waiting 0  capsules 1")
    assert [line.split()[:2] for line in shown[3:]] == [["w0", "ready"], ["w1", "ready"]]
    assert all(len(line.rstrip()) <= 80 for line in shown)
    body = json.loads(run("top", "--url", url, "--json").stdout)
    assert (len(body["workers"]), body["health"]["status"], body["capsules"]) == (2, "ok", 1)


def test_a_decision_is_explained_with_its_prices(url: str, client: Mallee) -> None:
    (branch,) = client.complete("a tree of many trunks", max_tokens=3)
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
    assert isinstance(refused.exception, ConfigError)
    assert "not in the decision log" in str(refused.exception)


def test_sessions_are_listed_shown_and_closed(url: str, client: Mallee) -> None:
    (first,) = client.complete("a tree", max_tokens=2, mallee={"session": "bug-7"})
    (second,) = client.complete("a tree", max_tokens=2, mallee={"session": "bug-8"})
    client.session("bug-7").fork("bug-7b")
    listed = run("sessions", "list", "--url", url).stdout.splitlines()
    assert [line.split() for line in listed[1:]] == [
        ["bug-7", "1", "0"], ["bug-7b", "bug-7", "1", "0"], ["bug-8", "1", "0"]
    ]  # fmt: skip
    one = run("sessions", "show", "bug-7b", "--url", url).stdout.splitlines()
    assert one[0] == "bug-7b, below bug-7"
    everything = run("sessions", "show", "--url", url).stdout
    assert everything.splitlines()[0] == "bug-7"
    assert str(first.capsule) in everything
    assert str(second.capsule) in everything
    # The terminal is none here: one look is all.
    assert run("sessions", "show", "--live", "--url", url).stdout == everything
    assert run("tree", "--live", "--url", url).stdout == everything
    live = run("tree", "bug-8", "--live", "--url", url, "--json").stdout
    assert live == run("sessions", "show", "bug-8", "--url", url, "--json").stdout
    body = json.loads(run("sessions", "show", "--url", url, "--json").stdout)
    assert [each["id"] for each in body["sessions"]] == ["bug-7", "bug-7b", "bug-8"]
    for name in ("bug-7", "bug-7b", "bug-8"):
        assert "released" in run("sessions", "close", name, "--url", url).stdout
    assert "no session" in run("sessions", "show", "--url", url).stdout
    missing = run("sessions", "show", "bug-7", "--url", url).exception
    assert isinstance(missing, NotFound)


def test_a_conversation_branches_and_is_drawn(url: str) -> None:
    """Turns, forks, ways back, the tree; a question goes on from where it is asked."""
    answer = talk(url, "one", "/fork 2 two", "/go 1", "three", "/back 9", "four", "/tree", "/quit")
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
    assert [line.split()[-3:-1] for line in forks][1] == ["computed", "0"]  # the second shares all


def test_the_same_seed_gives_the_same_answer_again(url: str) -> None:
    asked = ("tell", "/back", "tell", "/fork 2", "/tree")
    lines = talk(url, *asked, options=("--seed", "7", "--temperature", "1")).stdout.splitlines()
    tree = lines[lines.index("conversation") + 1 :]
    said = [line.split(" → ")[1].removesuffix(" ◀") for line in tree]
    assert len(said) == 4
    assert said[0] == said[1] == said[2]  # branch 0 of a fork draws as one alone
    assert said[3] != said[2]


def test_mistakes_are_told_and_the_conversation_goes_on(url: str) -> None:
    answer = talk(
        url, "/fork 2", "/fork x", "/fork 99 hi", "/go 7", "/back x", "/what", "hi", "/help"
    )
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
    too_long = talk(url, "a " * 5000, "hi")
    assert "tokens that this model serves" in " ".join(too_long.stderr.split())
    assert "turn 1, 6 tokens" in too_long.stdout


async def test_a_broker_that_refuses_is_a_fault_of_a_config_where_that_is_asked_for(
    tmp_path: Path,
) -> None:
    path = tmp_path / "fleet.yaml"

    async def checked(url: str) -> Result:
        path.write_text(f"model: m\nnats_url: {url}\n")
        return await asyncio.to_thread(run, "check", str(path), "--broker")

    broker = OpenBroker()
    await broker.start()
    try:
        assert (await checked(broker.url)).exit_code == 0
    finally:
        await broker.stop()
    answer = await checked(f"nats://127.0.0.1:{free_port()}")
    assert answer.exit_code == 1
    assert "no broker at 127.0.0.1:" in answer.stderr
