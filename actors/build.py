"""The parts of the service as a configuration describes them. Knows neither Ray nor torch."""

import logging
import os
import secrets
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mallee.actors.config import AppConfig
from mallee.protocol.ids import Incarnation, WorkerId
from mallee.worker.kv.watch import KVChecks
from mallee.worker.records import EngineConfig
from mallee.worker.sched.policy import SchedulerConfig

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from mallee.actors.gateway.service import Service
    from mallee.actors.telemetry.metrics import GatewayMetrics
    from mallee.router.dispatch.queue import AdmissionConfig
    from mallee.router.router import Router
    from mallee.router.sync.outbox import Outbox
    from mallee.worker.engine import Engine
    from mallee.worker.model.runner import TorchForward

log = logging.getLogger(__name__)


def served_name(config: AppConfig) -> str:
    """What clients call the model: as configured, else the model's own name without folders."""
    if config.served_model_name is not None:
        return config.served_model_name
    path = Path(config.model).expanduser()
    if path.suffix == ".gguf":
        return path.stem
    return path.resolve().name if path.is_dir() else config.model


def resolve(model: str) -> Path:
    """The folder of the model's files."""
    from mallee.worker.model.source import resolve_model

    return resolve_model(model)


def lease_s(config: AppConfig) -> float:
    """How long a gateway believes a lease."""
    return max(3.0, 3 * config.lease_interval_s)


def engine_config(config: AppConfig) -> EngineConfig:
    engine, scheduler, switches = config.engine, config.scheduler, config.experimental
    return EngineConfig(
        SchedulerConfig(
            scheduler.max_step_tokens,
            scheduler.max_rows,
            scheduler.max_waiting,
            scheduler.policy,
            scheduler.victims,
            ageing_steps=scheduler.ageing_steps,
            watermark=scheduler.watermark,
            gang=switches.gang,
            chunked=switches.chunked,
        ),
        engine.max_answer_capsules,
        max_kept_share=engine.max_kept_share,
        prefix_cache=engine.prefix_cache,
        eviction=engine.eviction,
        tree_attention=switches.tree_attention,
        overlap=switches.overlap,
        kv_checks=KVChecks(switches.kv_checks, switches.kv_faults),
    )


def build_router(config: AppConfig, outbox: "Outbox | None") -> "Router":
    """A router; what it books is told to others through `outbox`."""
    from mallee.router.config import (
        CostModel,  # numba, which workers and the broker don't need
        RouterConfig,
    )
    from mallee.router.router import Router

    routing = config.routing
    figures: dict[str, Any] = {str(name): value for name, value in routing.cost.items()}
    return Router(
        RouterConfig(
            block_size=config.engine.block_size,
            lease_s=lease_s(config),
            busy_ratio=config.admission.busy_rows_ratio,
            cost=CostModel(**figures, expected_output_tokens=routing.expected_output_tokens),
            max_workers=config.worker_room,
            policy=routing.policy,
            temperature=routing.temperature,
            max_index_nbytes=routing.max_index_mb << 20,
            kv_events=routing.kv_events,
        ),
        clock=time.monotonic,
        outbox=outbox,
    )


def admission_config(config: AppConfig) -> "AdmissionConfig":
    from mallee.router.dispatch.queue import AdmissionConfig

    return AdmissionConfig(
        max_waiting=config.admission.max_queued,
        max_waiting_per_tenant=config.admission.max_queued_per_tenant,
        max_wait_s=config.admission.max_queue_wait_s,
        weights=config.admission.tenant_weights,
    )


def build_api(
    config: AppConfig, path: Path, service: "Service", metrics: "GatewayMetrics"
) -> "Starlette":
    """The HTTP API in front of `service`, with the tokenizer in `path`."""
    from mallee.actors.http import api
    from mallee.actors.http.deltas import TextTools
    from mallee.actors.http.jobs import ApiLimits
    from mallee.actors.text.chat import ChatTemplate
    from mallee.actors.text.tokenizer import StopMatcher, Tokenizer

    tokenizer = Tokenizer.load(path)
    return api.build_api(
        service,
        tokenizer,
        ChatTemplate.load(path),
        TextTools(tokenizer.detokenizer, StopMatcher, tokenizer.token_bytes),
        model_name=served_name(config),
        limits=ApiLimits(
            max_body_bytes=config.http.max_body_bytes,
            max_branches=config.http.max_branches,
            api_key=config.http.api_key,
        ),
        created=int(time.time()),
        clock=time.time,
        new_id=lambda: uuid.uuid4().hex,
        draw_seed=lambda: secrets.randbits(64),
        metrics=metrics,
    )


def load_forward(config: AppConfig) -> "TorchForward":
    from mallee.worker.model.runner import load

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    engine = config.engine
    return load(
        resolve(config.model),
        num_blocks=config.num_blocks,
        kv_budget_bytes=int(engine.kv_gib * 2**30),
        block_size=engine.block_size,
        dtype=engine.dtype,
        kv_dtype=engine.kv_dtype,
        device=engine.device,
        threads=engine.threads or max(1, (cores or 1) // config.workers),
        name=served_name(config),
        max_model_len=engine.max_model_len,
    )


def make_engine(
    config: AppConfig, forward: "TorchForward", worker: WorkerId, incarnation: Incarnation
) -> "Engine":
    from mallee.worker.engine import Engine
    from mallee.worker.model.grammar import TokenGrammars
    from mallee.worker.updates import switch_on

    switch_on(config.experimental.debug_logs)
    forward.shares_reads = config.experimental.tree_attention
    return Engine(
        forward,
        config=engine_config(config),
        clock=time.monotonic,
        worker=worker,
        incarnation=incarnation,
        structures=TokenGrammars(
            resolve(config.model) / "tokenizer.json",
            forward.spec.vocab_size,
            forward.spec.eos_token_ids,
        ),
        report_fault=lambda error: log.error("%s: %s", worker, error),
    )
