"""The metrics of a process of workers: their engines by vLLM's names, and its connections to gateways."""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from time import time
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.registry import Collector

from mallee.actors.hosting.host import LOAD_WAIT_S, Host
from mallee.actors.hosting.worker import Worker
from mallee.protocol.events import EngineUse, Load
from mallee.runtime.telemetry.catalog import MOST_WORKERS, OTHERS
from mallee.runtime.telemetry.engines import EngineMeters
from mallee.runtime.telemetry.families import FewNames, Labelled, ProcessCollector, Shown, shown
from mallee.runtime.telemetry.metrics import exposition


class HostMetrics:
    """The metrics of the workers of `host`, and of those that it gets later. Belongs to its event loop."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._registry = CollectorRegistry(auto_describe=True)
        self._names = FewNames(MOST_WORKERS, OTHERS)
        self._meters = EngineMeters(self._registry)
        self._registry.register(ProcessCollector())
        self._registry.register(_HostCollector(host, self._names))
        host.on_add = self._watch
        for worker in host.workers.values():
            self._watch(worker)

    async def render(self, accept: str = "") -> bytes:
        """Prometheus text, with loads as fresh as a moment's wait gives them."""
        workers = self._host.workers.values()
        asked = [worker.renew_load() for worker in workers if worker.failure is None]
        if asked:
            await asyncio.wait(asked, timeout=LOAD_WAIT_S)
        return exposition(Labelled(self._registry, {}), accept)

    def _watch(self, worker: Worker) -> None:
        name = self._names.shown(worker.worker)
        worker.meter = self._meters.meter(worker.model.name, name)
        worker.runner.on_step = worker.meter.stepped


_SUMS: Final[Mapping[str, Callable[[Load, EngineUse], float]]] = {
    "vllm:num_requests_running": lambda load, use: load.rows,
    "vllm:num_requests_waiting": lambda load, use: load.waiting,
    "vllm:prefix_cache_queries_total": lambda load, use: (
        use.num_cached_tokens + use.num_prefill_tokens
    ),
    "vllm:prefix_cache_hits_total": lambda load, use: use.num_cached_tokens,
    "vllm:prompt_tokens_total": lambda load, use: use.num_prefill_tokens,
    "vllm:generation_tokens_total": lambda load, use: use.num_output_tokens,
    "vllm:num_preemptions_total": lambda load, use: use.num_preemptions,
}
_HOST: Final = {
    "mallee_host_compiling_grammars": attrgetter("compiling"),
    "mallee_host_gateways": attrgetter("gateways"),
    "mallee_host_batches_total": attrgetter("batches"),
    "mallee_host_slow_streams_total": attrgetter("slow_streams"),
    "mallee_host_silent_gateways_total": attrgetter("silent_gateways"),
}


class _HostCollector(Collector):
    """Engines by their last loads, and the host's counts."""

    def __init__(self, host: Host, names: FewNames) -> None:
        self._host = host
        self._names = names

    def collect(self) -> Iterator[Shown]:
        yield from self._engines()
        stats = self._host.stats()
        for name, read in _HOST.items():
            yield shown(name, read(stats))

    def _engines(self) -> Iterator[Shown]:
        engines: dict[tuple[str, str], list[Worker]] = {}
        for worker in self._host.workers.values():
            if worker.load is not None and worker.load.use is not None:
                key = (worker.model.name, self._names.shown(worker.worker))
                engines.setdefault(key, []).append(worker)
        for name, value in _SUMS.items():
            family = shown(name)
            for labels, workers in engines.items():
                family.add_metric(labels, sum(value(*_reported(each)) for each in workers))
            yield family
        usage, config = shown("vllm:kv_cache_usage_perc"), shown("vllm:cache_config_info")
        lora, opened = shown("vllm:lora_requests_info"), shown("mallee_engine_open_requests")
        for labels, workers in engines.items():
            usage.add_metric(labels, _usage(workers))
            size = workers[0].capacity
            config.add_metric((*labels, str(size.block_size), str(size.num_blocks)), 1)
            lora.add_metric((*labels, "0", "", ""), time())
            opened.add_metric(labels, sum(each.num_open for each in workers))
        yield from (usage, config, lora, opened)


def _reported(worker: Worker) -> tuple[Load, EngineUse]:
    load = worker.load
    assert load is not None, "an engine without a load"
    assert load.use is not None, "an engine without its use"
    return load, load.use


def _usage(workers: Sequence[Worker]) -> float:
    """The share of their blocks that are in use."""
    used = sum(_reported(each)[0].active_blocks for each in workers)
    return used / sum(each.capacity.num_blocks for each in workers)
