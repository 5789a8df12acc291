"""The examples of docs/api/examples.md: one of each operation, and each is run against a mocked fleet."""

import asyncio
import json
import os
import re
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import httpx
import pytest

from mallee.actors.mock.stack import MockStack
from mallee.api.openapi.operations import OPERATIONS, Operation
from mallee.runtime.addresses import free_port
from support.api_examples import PAGE, URL, heading, names, page
from support.fuzzing import CHATML, Oracle
from support.mock_scene import make_folder, mock_config

pytestmark = [
    pytest.mark.process,
    pytest.mark.nats,
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed"),
]

AGAIN = "python tests/support/api_examples.py"
EXAMPLE = re.compile(r"^## (.+?)\n\n.*?^```bash\n(.*?)^```\n\n```python\n(.*?)^```", re.M | re.S)
# Examples that a mocked fleet of one process refuses or does not know, each for what it lacks.
REFUSED = {
    "capsules.demote": "tiers",
    "capsules.take": "a file of an export",
    "capsules.export": "KV that could be read",
    "operators.change_weights": "weights",
    "operators.drain_worker": "a worker to spare",
}
RUNNING = {
    *("capsules.capture", "branches.prune", "branches.prioritize", "branches.inject"),
    "records.get",
}  # of a request that still runs


def examples() -> dict[str, tuple[str, str]]:
    return {name: (curl, python) for name, curl, python in EXAMPLE.findall(PAGE.read_text())}


def test_every_operation_has_both_examples() -> None:
    """I17, part: the page is the one that the table of operations gives."""
    missing = {heading(each) for each in OPERATIONS} - set(examples())
    assert not missing, f"no curl and Python in docs/api/examples.md; run `{AGAIN}`: {missing}"
    assert PAGE.read_text() == page(), f"docs/api/examples.md is not as the operations are: {AGAIN}"


@pytest.fixture
async def stack(tmp_path: Path) -> AsyncIterator[MockStack]:
    (tmp_path / "chat.jinja").write_text(CHATML)
    (tmp_path / "model").mkdir()
    (tmp_path / "a.file").write_bytes(b"no capsule")
    folder = make_folder(tmp_path / "model")
    more = {"chat__template": str(tmp_path / "chat.jinja"), "recording__folder": str(tmp_path)}
    config = mock_config(folder, mock__speedup=1.0, **more)
    async with MockStack(config, port=free_port()) as made:
        yield made


@pytest.mark.timeout(180)
async def test_every_example_is_answered_as_the_document_says(
    stack: MockStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I17, part: by curl with success and in the declared shape, in Python without an error."""
    oracle, written, problems = Oracle(), examples(), []
    monkeypatch.chdir(tmp_path)
    async with httpx.AsyncClient(base_url=stack.base_url, timeout=20) as client:
        for operation in OPERATIONS:
            curl, python = (
                each.replace(URL, stack.base_url).replace('"MODEL"', '"tiny"')
                for each in written[heading(operation)]
            )
            async with givens(client, operation) as given:
                answer = await run_curl(curl, given)
            problem = oracle.problem(operation, answer)
            is_refused = operation.handler in REFUSED
            if problem is None and answer.status_code not in operation.successes and not is_refused:
                problem = answer.text[:300]
            if problem:
                problems.append(f"{heading(operation)} by curl: {answer.status_code} {problem}")
            async with givens(client, operation) as given:
                said = await asyncio.to_thread(run_python, python, given)
            if said.startswith("error") or (
                said[:1] in "45" and said[3:4] == " " and not is_refused
            ):
                problems.append(f"{heading(operation)} in Python: {said[:300]}")
    assert not problems, "\n".join(problems)


@asynccontextmanager
async def running(client: httpx.AsyncClient) -> AsyncIterator[str]:
    """The id of a request with three branches that run meanwhile."""
    body = {"prompt": "A mallee", "max_tokens": 600, "n": 3, "ignore_eos": True, "stream": True}
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        begun: set[int] = set()
        async for line in answer.aiter_lines():
            event = json.loads(line.removeprefix("data: ") or "{}")
            begun |= {choice["index"] for choice in event.get("choices", ())}
            if len(begun) == 3:
                yield event["id"]
                return


@asynccontextmanager
async def givens(client: httpx.AsyncClient, operation: Operation) -> AsyncIterator[dict[str, str]]:
    """Ids that the example names, of things that are there while it runs."""
    made = await things(client, operation)
    if operation.handler not in RUNNING:
        yield made
        return
    async with running(client) as request:
        yield made | {"request": request}


A_MALLEE = {"prompt": "A mallee", "max_tokens": 2}
MADE: dict[str, tuple[str, dict[str, Any]]] = {  # by a request, whose answer has the id
    "capsule": ("/v1/capsules", {"prompt": "A long document", "ttl_s": 600}),
    "request": ("/v1/completions", A_MALLEE),
    "response": (
        "/v1/responses",
        {"input": "A mallee", "max_output_tokens": 2, "background": True},
    ),
    "conversation": (
        "/v1/conversations",
        {"items": [{"role": "user", "content": "I grow mallees."}]},
    ),
}
NAMED = {"file": "main.js", "model": "tiny", "worker": "none-of-ours", "branch": "0"}


async def things(client: httpx.AsyncClient, operation: Operation) -> dict[str, str]:
    """Ids for the path's parameters, of things just made; a new parameter needs its case here.

    The session that the example forks into is none yet.
    """
    made: dict[str, str] = {}

    async def posted(path: str, body: dict[str, Any]) -> Any:
        return (await client.post(path, json=body)).json()

    await client.delete("/v1/sessions/another")
    for name in names(operation):
        if name in MADE:
            made[name] = (await posted(*MADE[name]))["id"]
            if operation.handler == "capsules.restore":  # one of an answer
                (choice,) = (await posted("/v1/completions", A_MALLEE))["choices"]
                made[name] = choice["mallee"]["capsule"]
        elif name == "item":
            items = f"/v1/conversations/{made['conversation']}/items"
            made[name] = (await client.get(items)).json()["data"][0]["id"]
        elif name == "session":
            ours = {"session": "night-3", "record": True}
            await posted("/v1/completions", {**A_MALLEE, "mallee": ours})
            made[name] = "night-3"
        else:
            assert name in NAMED, f"say in {__file__} how to make a {name!r}"
            made[name] = NAMED[name]
    return made


async def run_curl(line: str, given: dict[str, str]) -> httpx.Response:
    more = " -s -w '\\n%{http_code} %{content_type}'"
    env = {**os.environ, **{name.upper(): value for name, value in given.items()}}
    running = await asyncio.create_subprocess_shell(
        line.rstrip("\n") + more, env=env, stdout=asyncio.subprocess.PIPE
    )
    said, _ = await asyncio.wait_for(running.communicate(), 20)
    content, _, told = said.rpartition(b"\n")
    status, _, kind = told.decode().partition(" ")
    return httpx.Response(int(status), headers={"content-type": kind}, content=content)


def run_python(text: str, given: dict[str, str]) -> str:
    out = StringIO()
    try:
        with redirect_stdout(out):
            exec(compile(text, "docs/api/examples.md", "exec"), dict(given))
    except Exception as error:  # the test's own finding, with its example's name
        return f"error: {json.dumps(repr(error))}"
    return out.getvalue()
