"""Workers as their settings make them, with a disk: found again, of other weights, in use, broken."""

import os
import resource
import signal
from pathlib import Path

import pytest

from mallee.actors.build import load_forward, make_engine
from mallee.protocol.ids import Incarnation, WorkerId
from mallee.protocol.messages import (
    Demote,
    Fork,
    Inspect,
    Limits,
    Prefill,
    Sampling,
    pack_tokens,
)
from mallee.runtime.config import AppConfig
from mallee.testing.random_model import random_model
from mallee.worker.engine import Engine
from mallee.worker.transfer.values import DISK
from support.run_out import run_out
from support.tokenizers_made import byte_level

PROMPT = [3 + i % 29 for i in range(40)]


def worker(model: Path, disk: Path, life: int = 1) -> Engine:
    engine = {"kv_tokens": 1024, "dtype": "float32", "disk_path": str(disk)}
    config = AppConfig.model_validate({"model": str(model), "engine": engine})
    return make_engine(config, load_forward(config, 1), WorkerId("w0"), Incarnation(life))


def fork(engine: Engine, request: str) -> list[int]:
    command = Fork(request, "p.0", (b"",), Limits(8), Sampling(seed=7))
    return run_out(engine, command).tokens[request]


def make_durable(engine: Engine) -> list[int]:
    """Capsule p.0 is on disk; the answer of a fork of it."""
    run_out(engine, Prefill("p", pack_tokens(PROMPT)))
    want = fork(engine, "f")
    _, (reply,) = run_out(engine, Demote("d", "p.0", DISK))
    assert reply.status is not None, reply.error
    assert reply.status.tier == "disk"
    return want


def test_a_worker_finds_its_capsules_again_and_another_of_its_name_serves_without(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """F24, part: through the settings. While a process has the disk, another serves without it."""
    first = worker(model, tmp_path)
    want = make_durable(first)
    second = worker(model, tmp_path, life=2)
    assert f"in use by process {os.getpid()}" in caplog.text
    assert second.snapshot().capsules == ()
    run_out(second, Prefill("p", pack_tokens(PROMPT)))
    assert fork(second, "f") == want
    _, (reply,) = run_out(second, Demote("d", "p.0", DISK))
    assert reply.error is not None
    assert reply.error[0] == "invalid_parameter"
    second.close()
    first.close()
    third = worker(model, tmp_path, life=3)
    _, (reply,) = run_out(third, Inspect("i", "p.0"))
    assert reply.status is not None
    assert (reply.status.tier, reply.status.boundary) == ("disk", len(PROMPT))
    assert fork(third, "f") == want
    assert third.stats().num_prefill_tokens == 0
    third.close()


def test_capsules_of_other_weights_are_not_taken_in(model: Path, tmp_path: Path) -> None:
    """F24, part: the volume outlives them; its blocks are found by nothing."""
    first = worker(model, tmp_path / "disk")
    make_durable(first)
    first.close()
    random_model("llama", 6, vocab_size=320).save(tmp_path / "model")
    byte_level().save(str(tmp_path / "model" / "tokenizer.json"))
    other = worker(tmp_path / "model", tmp_path / "disk", life=2)
    assert other.snapshot().capsules == ()
    assert other.snapshot().disk_hashes == b""
    make_durable(other)
    other.close()


def test_a_disk_that_can_not_be_opened_stops_nobody(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("no folder")
    engine = worker(model, tmp_path / "file")
    assert "w0 serves without its disk" in caplog.text
    assert "look after the disk" in caplog.text
    run_out(engine, Prefill("p", pack_tokens(PROMPT)))
    assert len(fork(engine, "f")) == 8
    engine.check()
    engine.close()


def test_a_full_disk_fails_demotions_and_nothing_else(model: Path, tmp_path: Path) -> None:
    """F24, part: the limit of file sizes stops a worker's write in its middle; later there is room."""
    engine = worker(model, tmp_path)
    run_out(engine, Prefill("p", pack_tokens(PROMPT)))
    want = fork(engine, "f")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 14, hard))
    try:
        _, (reply,) = run_out(engine, Demote("d", "p.0", DISK))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert reply.error is not None
    assert reply.error[0] == "storage_full"
    engine.check()
    assert fork(engine, "g") == want
    _, (reply,) = run_out(engine, Demote("again", "p.0", DISK))
    assert reply.status is not None
    assert reply.status.tier == "disk"
    assert fork(engine, "h") == want
    tiers = engine.stats().tiers
    assert tiers is not None
    assert tiers.num_failed == 1
    engine.close()
