"""Settings of workers on vLLM's engine: what they may have, and the devices that they ask for."""

from typing import Any

import pytest
from pydantic import ValidationError

from mallee.actors.build import check_model
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
