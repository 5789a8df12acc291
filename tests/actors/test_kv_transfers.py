"""Workers as their settings make them: they read each other's KV, and say so."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from bench.doubles.bus import LocalBus, LocalHub
from mallee.actors import build
from mallee.actors.build import WorkerProcess, build_worker
from mallee.actors.hosting.host import Host
from mallee.actors.hosting.meters import HostMetrics
from mallee.protocol.codec import encode
from mallee.protocol.errors import WorkerLost
from mallee.protocol.events import Lease, decode_leases
from mallee.protocol.ids import Incarnation, WorkerId
from mallee.protocol.messages import (
    Command,
    Fork,
    Holder,
    Limits,
    Prefill,
    Sampling,
    Update,
    pack_tokens,
)
from mallee.protocol.parcels import Parcel, decode_reports
from mallee.protocol.subjects import Subjects
from mallee.runtime.config import AppConfig
from mallee.runtime.transport.greeting import Secret
from mallee.worker.transfer.prices import MeasuredPrices
from mallee.worker.transfer.values import Ask
from support.expositions import check_exposition
from support.reading import Reader
from support.waiting import until

pytestmark = pytest.mark.real_time  # KV is sent by threads that block

PROMPT = [3 + i % 29 for i in range(100)]
FLIP_S = 2.0
OF_RECURRENT_LAYERS = {
    "mallee_worker_cached_states",
    "mallee_worker_cached_state_bytes",
    "mallee_worker_evicted_states_total",
}


class Fleet:
    """Two workers, each with a process's parts of its own, and what their leases say."""

    def __init__(self, processes: list[WorkerProcess]) -> None:
        self.processes = processes
        self.leases: dict[str, Lease] = {}

    def heard(self, raw: bytes) -> None:
        for lease in decode_leases(raw):
            self.leases[lease.worker] = lease

    async def ask(self, number: int, *commands: Command) -> list[int]:
        """Have worker `number` carry `commands` out; the tokens that were drawn."""
        host = self.processes[number].host
        worker = WorkerId(f"w{number}")
        tokens: list[int] = []
        open_ends = sum(len(c.suffixes) if isinstance(c, Fork) else 1 for c in commands)
        async with aclosing(Reader(host, f"g{len(self.leases)}-{commands[0]!r:.40}")) as reader:
            await reader.submit(encode([Parcel(worker, Incarnation(1), commands)]))
            async for raw in reader:
                updates: list[Update] = [
                    u for report in decode_reports(raw) for u in report.frame.updates
                ]
                for update in updates:
                    assert update.error is None, update.error
                    tokens += update.tokens
                    open_ends -= update.finish is not None
                if not open_ends:
                    break
        return tokens


@asynccontextmanager
async def fleet(
    model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, **links: Any
) -> AsyncIterator[Fleet]:
    hub = LocalHub()
    monkeypatch.setattr(build, "NatsBus", lambda *_, **__: LocalBus(hub))
    for name in ("share_interpreter", "freeze_heap"):
        monkeypatch.setattr(build, name, lambda: None)
    # Of so small a model nothing is worth fetching.
    monkeypatch.setattr(MeasuredPrices, "compute_s", lambda self, num_tokens: float(num_tokens))
    engine = {"kv_tokens": 1024, "dtype": "float32"}
    config = AppConfig.model_validate({"model": str(model), "engine": engine, "links": links})
    found = Fleet([])
    listener = LocalBus(hub)
    await listener.connect()
    await listener.subscribe(Subjects.of("default").lease(), found.heard)
    try:
        for i in range(2):
            process = await build_worker(
                config,
                WorkerId(f"w{i}"),
                Incarnation(1),
                broker=None,  # type: ignore[arg-type]
                secret=Secret(b"the secret of this app"),
                node=f"n{i}",
                threads=1,
            )
            found.processes.append(process)
            await process.listen(path=str(folder / f"w{i}.sock"))
            await process.listen(tcp_host="127.0.0.1")
            await process.start()
        await until(lambda: len(found.leases) == 2)
        yield found
    finally:
        for process in found.processes:
            await process.close()
        await listener.close()


def _active(lease: Lease) -> int:
    """Blocks in use by a lease's load, which has what routing needs."""
    assert lease.load is None or lease.load.use is None
    return 0 if lease.load is None else lease.load.active_blocks


def _sample(text: str, name: str, label: str = "") -> float:
    """The one sample of that name with that label."""
    lines = [line for line in text.splitlines() if line.startswith(name + "{") and label in line]
    (line,) = lines
    return float(line.split()[-1])


async def test_a_worker_shows_its_memory_and_its_latencies_to_scrapers(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I23, part, D22, part: weights, KV that was used, and the rest; steps, first tokens and gaps."""
    async with fleet(model, tmp_path, monkeypatch) as found:
        metrics = HostMetrics(found.processes[0].host)
        text = (await metrics.render()).decode()
        assert _sample(text, "mallee_worker_memory_bytes", 'part="weights"') > 0
        assert _sample(text, "mallee_worker_memory_bytes", 'part="kv"') == 0
        await found.ask(0, Prefill("p", pack_tokens(PROMPT)))
        await found.ask(0, Fork("f", "p.0", (b"", b""), Limits(8, ignore_eos=True)))
        text = (await metrics.render()).decode()
        load = found.processes[0].host.workers[WorkerId("w0")].load
        assert load is not None
        assert load.use is not None
        used = load.use.used_blocks * load.use.block_nbytes
        assert _sample(text, "mallee_worker_memory_bytes", 'part="kv"') == used > 0
        await until(lambda: _active(found.leases["w0"]) > 0)
        assert check_exposition(text, "worker") == OF_RECURRENT_LAYERS
        for name, count in (("time_to_first_token", 2), ("inter_token_latency", 14)):
            assert _sample(text, f"vllm:{name}_seconds_count") == count
        assert _sample(text, "mallee_engine_step_seconds_count") >= 8
        assert _sample(text, "vllm:generation_tokens_total") == 16


async def test_a_worker_reads_what_another_computed(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """X6, part: between nodes, by the address of a lease; the answer is that of the capsule's own worker."""
    fork = Fork("f", "p.0", (b"",), Limits(8), Sampling(temperature=1.0, seed=7))
    async with fleet(model, tmp_path, monkeypatch) as found:
        await found.ask(0, Prefill("p", pack_tokens(PROMPT)))
        want = await found.ask(0, fork)
        address = found.leases["w0"].address
        assert found.leases["w0"].serves_kv
        holder = Holder("w0", 1, address, len(PROMPT), "p.0")
        await found.ask(1, Prefill("p", pack_tokens(PROMPT), holders=(holder,)))
        assert await found.ask(1, fork) == want
        client, kv_use = found.processes[1].kv_client, found.processes[0].host.kv_use
        assert client is not None
        assert kv_use is not None
        await until(lambda: kv_use().lent.nbytes == client.counts.use.nbytes > 0)
        for number, direction, use in (
            (0, "lent", kv_use().lent),
            (1, "borrowed", client.counts.use),
        ):
            text = (await HostMetrics(found.processes[number].host).render()).decode()
            for name in ("lent", "borrowed"):
                shown = _sample(text, "mallee_worker_loan_bytes_total", f'direction="{name}"')
                assert shown == (use.nbytes if name == direction else 0)
        past = Ask(Holder("w0", 7, address, 0, "p.0"), (), "")
        with pytest.raises(WorkerLost, match="that life of it is over"):
            await asyncio.to_thread(client.lend, past)
        host = found.processes[0].host
        assert host.healthy()
        with monkeypatch.context() as broken:
            broken.setattr(Host, "lend", lambda *_: 1 // 0)
            with pytest.raises(WorkerLost, match="closed"):
                await asyncio.to_thread(client.lend, past)
        await until(lambda: not host.healthy(), FLIP_S)


async def test_workers_that_serve_no_kv_say_so(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fleet(model, tmp_path, monkeypatch, lends=False) as found:
        assert not any(lease.serves_kv for lease in found.leases.values())
        text = (await HostMetrics(found.processes[0].host).render()).decode()
        assert "mallee_worker_loan" not in text
        assert all(lease.is_prefix_closed for lease in found.leases.values())
        holder = Holder("w0", 1, found.leases["w0"].address, len(PROMPT))
        await found.ask(1, Prefill("p", pack_tokens(PROMPT), holders=(holder,)))
