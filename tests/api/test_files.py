"""Capsules as files over HTTP: out of one server and into another, and all that is refused."""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from mallee.actors.kv_transfer.client import RemoteBlocks
from mallee.client import AsyncMallee, Mallee, StreamBroken, UnknownCapsule
from mallee.protocol.errors import CorruptExport, MalleeError, WorkerLost
from support.file_server import PROMPT, SAMPLED, FileServer, cut_answer, file_server
from support.waiting import until

pytestmark = pytest.mark.real_time  # loans cross sockets between threads

GREEDY: dict[str, Any] = {"temperature": 0.0}


@pytest.mark.parametrize("way", [SAMPLED, GREEDY], ids=["sampled", "greedy"])
async def test_an_answer_goes_on_at_another_server(way: dict[str, Any], tmp_path: Path) -> None:
    """F1, part, S8, part: through a file, over HTTP; forks, rewinds and a second export of it work."""
    seen: list[tuple[int, int | None]] = []
    async with (
        file_server(tmp_path) as here,
        file_server(tmp_path) as there,
        AsyncMallee(here.url) as client,
        AsyncMallee(there.url) as other,
    ):
        capsule, begun, whole = await cut_answer(client, **way)
        path = tmp_path / "kept.capsule"
        nbytes = await capsule.export(path, progress=lambda *told: seen.append(told))
        assert path.stat().st_size == nbytes
        assert seen[-1] == (nbytes, nbytes)
        seen.clear()

        made = await other.import_capsule(path, ttl_s=60, progress=lambda *told: seen.append(told))
        assert seen[-1] == (nbytes, nbytes)
        assert made.id != capsule.id
        assert made.tokens == capsule.tokens
        fetched = made.tokens - 1  # the last one was drawn, and not computed
        assert made.data.imported.fetched_tokens == fetched
        assert made.data.imported.bytes == nbytes
        (engine,) = there.fleet.engines.values()
        assert engine.stats().num_prefill_tokens == 0
        shown = await other.capsule(made.id)
        assert shown.data.pinned
        assert 0 < (shown.data.ttl_s or 0) <= 60

        (gone_on,) = await made.restore().wait()
        assert begun + gone_on.text == whole
        (plain,) = await capsule.fork(1, max_tokens=8, ignore_eos=True, **way).wait()
        (forked,) = await made.fork(1, max_tokens=8, ignore_eos=True, **way).wait()
        assert forked.text == plain.text
        back = await made.rewind(len(PROMPT) + 4)
        (again,) = await back.restore().wait()
        assert begun[:4] + again.text == whole

        second = tmp_path / "second.capsule"
        await made.export(second)
        assert second.read_bytes() == path.read_bytes()
        cold = await other.complete(PROMPT, max_tokens=1)  # nobody's prompt finds what was imported
        assert cold.cached_tokens == 0
        path.unlink()
        second.unlink()
    assert names_in(tmp_path) == []


async def exported(url: str) -> tuple[str, bytes]:
    async with httpx.AsyncClient(base_url=url, timeout=30) as http:
        made = (await http.post("/v1/capsules", json={"prompt": PROMPT})).json()
        answer = await http.get(f"/v1/capsules/{made['id']}/export")
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "application/octet-stream"
        assert f'filename="{made["id"]}.capsule"' in answer.headers["content-disposition"]
        assert int(answer.headers["content-length"]) == len(answer.content)
        return made["id"], answer.content


async def refused(http: httpx.AsyncClient, body: bytes, **query: Any) -> tuple[int, str, str]:
    answer = await http.post("/v1/capsules/import", content=body, params=query)
    error = answer.json()["error"]
    return answer.status_code, error["code"], error["message"]


async def settled(server: FileServer, capsules: int) -> None:
    """Nothing of an import or an export is left, and so many capsules are."""
    imports = server.desk.files.imports
    await until(lambda: imports.spools.num_open == 0 and not len(imports.lender))
    await until(lambda: server.desk.files.exports.num_open == 0)
    (engine,) = server.fleet.engines.values()
    await until(lambda: engine.stats().lending.open == 0)
    assert imports.spools.nbytes == 0
    assert engine.stats().capsules.kept == capsules


async def test_what_is_no_whole_file_of_this_model_is_refused_by_name(tmp_path: Path) -> None:
    """F24, part: and leaves no capsule, no file, no loan."""
    async with (
        file_server(tmp_path) as server,
        file_server(tmp_path, seed=6) as other,
        httpx.AsyncClient(base_url=server.url, timeout=30) as http,
    ):
        _, data = await exported(server.url)
        flipped = data[:-700] + bytes([data[-700] ^ 1]) + data[-699:]
        for wrong, region in ((data[:-1], "end"), (flipped, "block"), (data + b"x", "end")):
            status, code, message = await refused(http, wrong)
            assert (status, code) == (400, "corrupt_export")
            assert region in message
        for nonsense in (b"", b"{}", os.urandom(1000)):
            assert (await refused(http, nonsense))[:2] == (400, "corrupt_export")
        _, foreign = await exported(other.url)
        status, code, message = await refused(http, foreign)
        assert (status, code) == (409, "incompatible_capsule")
        assert "fingerprint" in message
        for query, param in (({"ttl_s": "x"}, "ttl_s"), ({"nope": "1"}, "nope")):
            status, code, message = await refused(http, data, **query)
            assert (status, code) == (400, "invalid_parameter")
            assert param in message
        assert (await refused(http, data, model="other"))[0] == 404
        assert (await refused(http, data, ttl_s=1e9))[0] == 400
        await settled(server, 1)
        answer = await http.post("/v1/capsules/import?ttl_s=5&session=a", content=data)
        assert answer.status_code == 200
        assert answer.json()["ttl_s"] == 5.0
        await settled(server, 2)
    with pytest.raises(MalleeError, match="no folder"):
        async with file_server(tmp_path / "nowhere"):
            pass


async def test_a_file_larger_than_may_be_is_refused_with_and_without_its_length(
    tmp_path: Path,
) -> None:
    async with file_server(tmp_path, max_gib=1e-5) as server:  # 10,737 bytes
        _, data = await exported(server.url)
        large = data + bytes(20_000)

        async def pieces() -> AsyncIterator[bytes]:
            for i in range(0, len(large), 4096):
                yield large[i : i + 4096]

        async with httpx.AsyncClient(base_url=server.url, timeout=30) as http:
            for body in (large, pieces()):
                answer = await http.post("/v1/capsules/import", content=body)
                assert answer.status_code == 413
                assert "imports.max_gib" in answer.json()["error"]["message"]
        await settled(server, 1)
    async with (
        file_server(tmp_path, max_gib=0) as server,
        httpx.AsyncClient(base_url=server.url) as http,
    ):
        answer = await http.post("/v1/capsules/import", content=data)
        assert (answer.status_code, "imports.max_gib" in answer.text) == (400, True)


async def test_clients_that_are_gone_in_the_middle_leave_nothing(tmp_path: Path) -> None:
    async with file_server(tmp_path) as server:
        name, data = await exported(server.url)
        host, port = server.url.removeprefix("http://").split(":")
        head = (
            f"POST /v1/capsules/import HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n"
        )
        for sent in (0, 10, len(data) // 2, len(data) - 1, len(data)):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(head.encode() + data[:sent])
            await writer.drain()
            await asyncio.sleep(0.02)
            writer.close()
            await writer.wait_closed()
            del reader
        await until(lambda: server.desk.files.imports.spools.num_open == 0)
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(f"GET /v1/capsules/{name}/export HTTP/1.1\r\nhost: x\r\n\r\n".encode())
        await reader.read(10)
        writer.close()
        await until(lambda: server.desk.files.exports.num_open == 0)
        (engine,) = server.fleet.engines.values()
        await until(lambda: engine.stats().lending.open == 0)
        async with httpx.AsyncClient(base_url=server.url) as http:
            listed = (await http.get("/v1/capsules")).json()["data"]
        assert len(listed) <= 2  # the one whose file had come whole may have been made
        assert names_in(tmp_path) == []


async def test_a_broken_export_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer's length tells that it was cut."""
    monkeypatch.setattr("mallee.gateway.capsules.files.exports.RUN_NBYTES", 4096)
    async with file_server(tmp_path) as server, AsyncMallee(server.url) as client:
        capsule = await client.prefill(PROMPT * 12)
        (tmp_path / "kept").write_bytes(b"before")

        reads = []

        def breaks(loan: RemoteBlocks, *asked: Any) -> None:
            reads.append(loan)
            if len(reads) > 2:
                raise WorkerLost("w0", "it was killed")
            read(loan, *asked)

        read = RemoteBlocks.read
        monkeypatch.setattr(RemoteBlocks, "read", breaks)
        with pytest.raises(StreamBroken):
            await capsule.export(tmp_path / "kept")
        assert (tmp_path / "kept").read_bytes() == b"before"
        assert names_in(tmp_path) == ["kept"]


async def test_the_plain_sdk_exports_and_imports(tmp_path: Path) -> None:
    """F7, part: what is imported belongs to who sends it."""
    path = tmp_path / "a.capsule"

    def there_and_back(url: str) -> tuple[str, str]:
        with Mallee(url) as client, client.prefill(PROMPT) as capsule:
            with path.open("wb") as file:
                nbytes = capsule.export(file)
            with path.open("rb") as file:
                made = client.import_capsule(file)
                assert made.data.imported.bytes == nbytes == path.stat().st_size
            texts = [
                kept.fork(1, max_tokens=4, ignore_eos=True, **SAMPLED).wait()[0].text
                for kept in (capsule, made)
            ]
            theirs = client.import_capsule(path, cache_salt="other")
            with pytest.raises(UnknownCapsule):
                client.capsule(theirs.id, cache_salt="mine")
            client.capsule(theirs.id, cache_salt="other")
            cold = client.complete(PROMPT, max_tokens=1, cache_salt="other")
            assert cold.cached_tokens == 0
            path.write_bytes(b"nonsense")
            with pytest.raises(CorruptExport):
                client.import_capsule(path)
            return texts[0], texts[1]

    async with file_server(tmp_path) as server:
        here, back = await asyncio.to_thread(there_and_back, server.url)
    assert here == back


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())
