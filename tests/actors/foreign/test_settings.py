"""Settings of workers on vLLM's engine: what they may have, and the devices that they ask for."""

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from typer.testing import CliRunner

from mallee.actors.build import check_model
from mallee.actors.foreign.arguments import argument_faults, known_arguments
from mallee.actors.foreign.vllm import engine_args
from mallee.cli.main import cli
from mallee.protocol.errors import ConfigError
from mallee.runtime.config import AppConfig


def config(ray: dict[str, Any] | None = None, **engine: Any) -> AppConfig:
    given = {"kind": "vllm", **engine}
    return AppConfig.model_validate({"model": "m", "engine": given, "ray": ray or {}})


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"kv_gib": 2}, "engine.kv_gib=2.0 needs engine.kind='model', not 'vllm'"),
        ({"speculation": "prompt"}, "needs engine.kind='model'"),
        ({"kind": "model", "vllm": {"seed": 1}}, "needs engine.kind='vllm', not 'model'"),
        ({"kind": "mock", "vllm": {"seed": 1}}, "needs engine.kind='vllm', not 'mock'"),
        ({"vllm": {"tensor_parallel_size": 0}}, "tensor_parallel_size=0: give 1 or more"),
        ({"vllm": {"pipeline_parallel_size": "2"}}, "pipeline_parallel_size='2': give 1 or more"),
        (
            {"vllm": {"tensor_parallel_size": 4}, "ray": {"worker_gpus": 2}},
            "over 4 devices: give 4, or leave it out",
        ),
    ],
)
def test_settings_of_other_engines_are_refused(given: dict[str, Any], reason: str) -> None:
    ray = given.pop("ray", None)
    with pytest.raises(ValidationError, match=reason):
        config(ray, **given)


def test_a_worker_over_one_device_is_an_actor_with_it() -> None:
    assert config(device="cuda").worker_gpus == 1.0
    assert config().worker_gpus == 0.0
    assert config(device="cuda").worker_bundles == []


def test_a_worker_over_several_devices_asks_for_a_bundle_each() -> None:
    """The actor fits into the first one, as Ray Serve wants it."""
    ray = {"worker_cpus": 2.0, "worker_resources": {"fast": 1.0}}
    parallel = {"tensor_parallel_size": 4, "pipeline_parallel_size": 2}
    found = config(ray, device="cuda", vllm=parallel)
    assert found.worker_gpus == 8.0
    first, *others = found.worker_bundles
    assert first == {"GPU": 1.0, "CPU": 2.0, "fast": 1.0}
    assert others == [{"GPU": 1.0}] * 7
    first, *others = config(vllm=parallel).worker_bundles
    assert (first, others) == ({"CPU": 1.1}, [{"CPU": 1.0}] * 7)


def test_without_vllm_the_error_names_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mallee.actors.build.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="serve,vllm"):
        check_model(config())


SOURCE = """
class EngineArgs:
    model: str = ModelConfig.model
    max_num_seqs: int | None = None
    gpu_memory_utilization: float = CacheConfig.gpu_memory_utilization
    enforce_eager: bool = False
    dtype: ModelDType = ModelConfig.dtype

class AsyncEngineArgs(EngineArgs):
    enable_log_requests: bool = False
"""


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        ({"max_num_seq": 8}, "no argument of vLLM's engine; the nearest is `max_num_seqs`"),
        ({"modl": "x"}, "the nearest is `model`: give it as `model`"),
        ({"zzz": 1}, "no argument of vLLM's engine; vLLM's documentation has them"),
        ({"block_size": 8}, "block_size is not taken: give it as `engine.block_size`"),
        ({"max_num_seqs": "8"}, "max_num_seqs='8': vLLM wants int | None"),
        ({"enforce_eager": 1}, "enforce_eager=1: vLLM wants bool"),
        ({"max_num_seqs": True}, "max_num_seqs=True: vLLM wants int | None"),
        ({"gpu_memory_utilization": 1, "dtype": ["?"], "enable_log_requests": True}, ""),
    ],
)
def test_arguments_are_held_against_vllms_source_before_it_is_loaded(
    given: dict[str, Any], fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name, or a value of a plain type, with the nearest name; and by `mallee check`."""
    (tmp_path / "vllm" / "engine").mkdir(parents=True)
    (tmp_path / "vllm" / "__init__.py").write_text("raise AssertionError('it is not imported')")
    (tmp_path / "vllm" / "engine" / "arg_utils.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    told = list(argument_faults(given, known_arguments()))
    assert len(told) == bool(fault)
    assert fault in "".join(told)
    settings = tmp_path / "settings.yaml"
    content = {"model": str(tmp_path), "engine": {"kind": "vllm", "vllm": given}}
    settings.write_text(json.dumps(content))
    found = CliRunner().invoke(cli, ["check", str(settings)])
    assert found.exit_code == bool(fault)
    assert fault in found.stderr
    if fault:
        with pytest.raises(ConfigError, match=r"engine\.vllm"):
            engine_args(AppConfig.model_validate(content))
        served = CliRunner().invoke(cli, ["serve", "--config", str(settings)])
        assert fault in str(served.exception), "before Ray is started"


def test_without_vllm_check_says_that_its_arguments_are_not_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mallee.actors.foreign.arguments.find_spec", lambda name: None)
    monkeypatch.setattr("mallee.cli.check.find_spec", lambda name: None)
    settings = tmp_path / "settings.yaml"
    settings.write_text('{"model": "m", "engine": {"kind": "vllm", "vllm": {"zzz": 1}}}')
    found = CliRunner().invoke(cli, ["check", str(settings)])
    assert found.exit_code == 0
    assert "vllm is not installed here" in found.stdout
