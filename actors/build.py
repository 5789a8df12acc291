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
    return max(3.0, 3 * config.lease_period_s)


def engine_config(config: AppConfig) -> EngineConfig:
    return EngineConfig(
        SchedulerConfig(
            config.max_step_tokens,
            config.max_rows,
            config.max_waiting,
            config.scheduling,
            config.victims,
            ageing_steps=config.ageing_steps,
            watermark=config.watermark,
            gang=config.gang,
            chunked=config.chunked,
        ),
        config.max_answer_capsules,
        max_kept_share=config.max_kept_share,
        prefix_cache=config.prefix_cache,
        eviction=config.eviction,
        tree_attention=config.tree_attention,
        overlap=config.overlap,
        kv_checks=KVChecks(config.kv_checks, config.kv_faults),
    )


def build_router(config: AppConfig, outbox: "Outbox | None") -> "Router":
    """A router; what it books is told to others through `outbox`."""
    from mallee.router.config import (
        CostModel,  # numba, which workers and the broker don't need
        RouterConfig,
    )
    from mallee.router.router import Router

    figures: dict[str, Any] = {str(name): value for name, value in config.cost.items()}
    return Router(
        RouterConfig(
            block_size=config.block_size,
            lease_s=lease_s(config),
            busy_ratio=config.busy_rows_ratio,
            cost=CostModel(**figures, expected_output_tokens=config.expected_output_tokens),
            max_workers=config.max_workers,
            policy=config.policy,
            temperature=config.temperature,
            max_index_nbytes=config.max_index_mb << 20,
            kv_events=config.kv_events,
        ),
        clock=time.monotonic,
        outbox=outbox,
    )


def admission_config(config: AppConfig) -> "AdmissionConfig":
    from mallee.router.dispatch.queue import AdmissionConfig

    return AdmissionConfig(
        max_waiting=config.max_queued,
        max_waiting_per_tenant=config.max_queued_per_tenant,
        max_wait_s=config.max_queue_wait_s,
        weights=config.tenant_weights,
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
            max_body_bytes=config.max_body_bytes,
            max_branches=config.max_branches,
            api_key=config.api_key,
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
    return load(
        resolve(config.model),
        num_blocks=config.num_blocks,
        kv_budget_bytes=config.kv_budget_mb << 20,
        block_size=config.block_size,
        dtype=config.dtype,
        kv_dtype=config.kv_dtype,
        device=config.device,
        threads=config.threads or max(1, (cores or 1) // config.workers),
        name=served_name(config),
        max_model_len=config.max_model_len,
    )


def make_engine(
    config: AppConfig, forward: "TorchForward", worker: WorkerId, incarnation: Incarnation
) -> "Engine":
    from mallee.worker.engine import Engine
    from mallee.worker.model.grammar import TokenGrammars
    from mallee.worker.updates import switch_on

    switch_on(config.debug_logs)
    forward.shares_reads = config.tree_attention
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
