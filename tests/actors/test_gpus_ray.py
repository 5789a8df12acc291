"""Workers by Ray's assignment of GPUs, on a machine whose Ray is told of two that are not there."""

from pathlib import Path

import httpx
import pytest

from bench.doubles.random_model import random_model
from support.ray_marks import PROCESS_MARKS
from support.serve_command import serving
from support.tokenizers_made import byte_level

pytestmark = PROCESS_MARKS


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny model; Ray counts two GPUs here."""
    monkeypatch.setenv("RAY_OVERRIDE_RESOURCES", '{"GPU": 2}')
    random_model(vocab_size=340).save(tmp_path)
    byte_level().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    return tmp_path


def test_each_worker_has_a_gpu_of_its_own(folder: Path) -> None:
    """Ray's number of it is in the leases, and so in the list of workers."""
    settings = {
        "model": str(folder),
        "workers": 2,
        "engine": {"kv_tokens": 1024, "threads": 1},
        "ray": {"worker_gpus": 1},
    }
    with serving(settings) as service:
        workers = httpx.get(f"{service.url}/v1/router/workers", timeout=30).json()["data"]
    assert {each["device"] for each in workers} == {"GPU 0", "GPU 1"}
    assert len(workers) == 2
