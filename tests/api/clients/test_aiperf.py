"""aiperf 0.13 against a mocked fleet: chat, rows of Mooncake, trees of forks. `make clients` installs it."""

import asyncio
import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from mallee.actors.mock.stack import MockStack
from mallee.runtime.addresses import free_port
from support.fuzzing import CHATML
from support.mock_scene import make_folder, mock_config

AIPERF = os.environ.get("AIPERF") or shutil.which("aiperf")
pytestmark = [
    pytest.mark.process,
    pytest.mark.nats,
    pytest.mark.slow,
    pytest.mark.skipif(AIPERF is None, reason="aiperf is not installed: make clients"),
]

WORDS = "root stem leaf bark bud soil fire rain"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def hub(folder: Path, tmp_path: Path) -> Path:
    """The tokenizer as a hub's cache has it, the only place where aiperf reads one offline."""
    model = tmp_path / "hf" / "hub" / "models--local--tok"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text("a" * 40)
    kept = model / "snapshots" / ("a" * 40)
    shutil.copytree(folder, kept)
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 1 << 20}
    if not (kept / "tokenizer_config.json").exists():
        (kept / "tokenizer_config.json").write_text(json.dumps(named))
    return tmp_path / "hf"


def mooncake(num: int) -> Iterator[dict[str, Any]]:
    """Rows that share their first block of 512 tokens by eight."""
    for i in range(num):
        yield {
            "timestamp": i * 20,
            "input_length": 700,
            "output_length": 5,
            "hash_ids": [i // 8, 1000 + i],
        }


def trees(num: int) -> Iterator[dict[str, Any]]:
    """Trees of nine requests: a turn, and four children with two turns each that go on from it."""

    def turn(text: str, **more: Any) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": text}], "max_tokens": 5, **more}

    for i in range(num):
        kids = [f"t{i}-{k}" for k in range(4)]
        yield {
            "session_id": f"t{i}",
            "turns": [turn(f"{WORDS} {i}", forks=kids)],
        }
        for k, kid in enumerate(kids):
            yield {"session_id": kid, "turns": [turn(f"{WORDS} {k} one"), turn(f"{k} two")]}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("rows", "requests", "arguments", "num_children"),
    [
        (None, 20, ["--request-count", "20", "--concurrency", "4", "--isl", "60", "--osl", "5"], 0),
        (mooncake(50), 50, ["--custom-dataset-type", "mooncake_trace", "--fixed-schedule"], 0),
        (trees(10), 90, ["--custom-dataset-type", "dag-jsonl", "--concurrency", "4"], 40),
    ],
    ids=["chat", "mooncake", "forks"],
)
async def test_aiperf_has_every_request_answered(
    folder: Path,
    hub: Path,
    tmp_path: Path,
    rows: Any,
    requests: int,
    arguments: list[str],
    num_children: int,
) -> None:
    """I17, part: the counts are aiperf's own; forks come with the headers of their sessions."""
    if rows is not None:
        written = tmp_path / "rows.jsonl"
        written.write_text("".join(json.dumps(row) + "\n" for row in rows))
        arguments = ["--input-file", str(written), *arguments]
    template = tmp_path / "chat.jinja"
    template.write_text(CHATML)
    config = mock_config(folder, chat__template=str(template))
    async with MockStack(config, port=free_port()) as stack:
        async with httpx.AsyncClient(base_url=stack.base_url) as client:
            (served,) = (await client.get("/v1/models")).json()["data"]
        assert AIPERF is not None
        running = await asyncio.create_subprocess_exec(
            *(AIPERF, "profile", "-m", served["id"], "--url", stack.base_url),
            *("--endpoint-type", "chat", "--streaming", "--tokenizer", "local/tok", "--ui", "none"),
            *("--no-gpu-telemetry", "--no-server-metrics", "--artifact-dir", str(tmp_path / "out")),
            *arguments,
            env={
                **{k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
                "HF_HOME": str(hub),
                "HF_HUB_OFFLINE": "1",
                "AIPERF_HTTP_X_DYNAMO_SESSION_ID_FROM_CORRELATION_ID": "true",
            },
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        said, _ = await running.communicate()
        sys.stdout.write(said.decode(errors="replace")[-4000:])
        assert running.returncode == 0
        async with httpx.AsyncClient(base_url=stack.base_url) as client:
            sessions = (await client.get("/v1/sessions?limit=100")).json()["data"]
    # Forks go on from their parent's capsule, by the names that aiperf gives sessions in its headers.
    assert sum(each["parent"] is not None for each in sessions) == num_children
    lines = next((tmp_path / "out").rglob("profile_export.jsonl")).read_text().splitlines()
    records = [json.loads(line) for line in lines]
    failed = [each["error"] for each in records if each.get("error")]
    assert (len(records), failed) == (requests, [])
