"""The runner on a real vLLM, in the Python of MALLEE_VLLM_PYTHON, which has `mallee[serve]`, too."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

PYTHON = os.environ.get("MALLEE_VLLM_PYTHON")
ROOT = Path(__file__).resolve().parents[3]

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.process,
    pytest.mark.skipif(PYTHON is None, reason="MALLEE_VLLM_PYTHON names no Python with vllm"),
]


@pytest.fixture(scope="module")
def told() -> Any:
    """The findings of `support.vllm_run`: one engine for all tests here."""
    assert PYTHON is not None
    paths = os.pathsep.join((str(ROOT / "src"), str(ROOT / "tests"), str(ROOT)))
    environment = {**os.environ, "PYTHONPATH": paths, "VLLM_CPU_KVCACHE_SPACE": "1"}
    done = subprocess.run(
        [PYTHON, "-m", "support.vllm_run"], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_the_model_is_vllms_and_its_fingerprint_none_of_ours(told: dict[str, Any]) -> None:
    assert told["fingerprint"].startswith("vllm-")
    assert told["vocab_size"] == 49152


def test_answers_are_those_of_the_plain_engine(told: dict[str, Any]) -> None:
    """Alone, four at once, as forks of a capsule, and after 5 tokens that were drawn elsewhere."""
    assert told["alone"] == told["plain"]
    assert told["choices"] == [told["plain"]] * 4
    assert told["fork"] == told["plain_fork"]
    assert told["continued"] == told["plain"]


def test_a_shared_prompt_is_computed_once(told: dict[str, Any]) -> None:
    """Of four cold choices the first computes the prompt, each other one its last block at most."""
    first, *others = told["prefill_tokens"]
    assert first == told["prompt_tokens"]
    assert all(0 < each <= told["block_size"] for each in others)


def test_the_events_name_what_the_engine_has(told: dict[str, Any]) -> None:
    assert told["held"] >= told["prompt_tokens"] // told["block_size"]
    assert told["promised_tokens"] == told["cached_tokens"]


def test_log_probabilities_and_forms_come(told: dict[str, Any]) -> None:
    assert all(len(top) == 3 for _, top in told["logprobs"])
    assert json.loads(told["form"]).keys() == {"city"}
    assert "".join(told["lark"]) in ("yes", "no")


def test_what_vllm_refuses_is_the_callers_error(told: dict[str, Any]) -> None:
    assert told["refused"][0] == "invalid_parameter"
    assert "temperature" in told["refused"][1]


def test_a_dead_core_is_a_lost_worker(told: dict[str, Any]) -> None:
    assert "dead" in told["failure"]


def test_arguments_are_checked_against_vllms(told: dict[str, Any]) -> None:
    assert "the nearest is `max_num_seqs`" in told["unknown"]
    assert "engine.block_size" in told["ours"]
    assert told["near_ours"].endswith("`max_model_len`: give it as `engine.max_model_len`")


def test_what_exceeds_vllms_own_queue_may_be_sent_again(told: dict[str, Any]) -> None:
    assert told["full"] == ["unavailable"]
