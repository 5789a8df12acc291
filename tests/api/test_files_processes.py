"""Capsules as files: by curl, and out of one process into another, which is killed."""

import asyncio
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from mallee.client import AsyncMallee
from support.file_server import PROMPT, SAMPLED, cut_answer, file_server

pytestmark = pytest.mark.process

SUPPORT = Path(__file__).resolve().parents[1]


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl here")
async def test_curl_exports_and_imports(tmp_path: Path) -> None:
    async with file_server(tmp_path) as server, httpx.AsyncClient(base_url=server.url) as http:
        name = (await http.post("/v1/capsules", json={"prompt": PROMPT})).json()["id"]
        file = tmp_path / "a.capsule"
        await curl("-fsS", "-o", str(file), f"{server.url}/v1/capsules/{name}/export")
        assert file.read_bytes() == (await http.get(f"/v1/capsules/{name}/export")).content
        for form in (("-T", str(file), "-X", "POST"), ("--data-binary", f"@{file}")):
            answer = await curl("-fsS", *form, f"{server.url}/v1/capsules/import?ttl_s=60")
            assert b'"fetched_tokens":50' in answer
        file.unlink()


async def curl(*arguments: str) -> bytes:
    process = await asyncio.create_subprocess_exec(
        "curl", *arguments, stdout=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(20):
        out, _ = await process.communicate()
    assert process.returncode == 0
    return out


@asynccontextmanager
async def other_process(folder: Path) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    paths = [str(SUPPORT), os.environ.get("PYTHONPATH", "")]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "support.file_server", str(folder)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(60):
            url = (await process.stdout.readline()).decode().strip()
        assert url, "the server did not start"
        yield process, url
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_a_fresh_process_goes_on_and_one_that_is_killed_leaves_no_file(
    tmp_path: Path,
) -> None:
    """F1, part, F24, part: kill -9 in the middle of an import, with gateway and worker."""
    spools, path = tmp_path / "spools", tmp_path / "kept.capsule"
    spools.mkdir()
    async with file_server(spools) as here, AsyncMallee(here.url) as client:
        capsule, begun, whole = await cut_answer(client, **SAMPLED)
        nbytes = await capsule.export(path)
    async with other_process(spools) as (process, url):
        async with AsyncMallee(url) as client:
            made = await client.import_capsule(path)
            assert made.data.imported is not None
            assert made.data.imported.fetched_tokens == made.tokens - 1
            (gone_on,) = await made.restore().wait()
            assert begun + gone_on.text == whole
        host, port = url.removeprefix("http://").split(":")
        head = f"POST /v1/capsules/import HTTP/1.1\r\nhost: x\r\ncontent-length: {nbytes}\r\n\r\n"
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(head.encode() + path.read_bytes()[:-100])
        await writer.drain()
        process.send_signal(signal.SIGKILL)
        await process.wait()
        writer.close()
    assert not list(spools.iterdir())
