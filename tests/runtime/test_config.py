"""Settings: refused with a clear sentence where they can't be, and derived where they are left out."""

from typing import Any

import pytest
from pydantic import ValidationError

from mallee.actors.build import engine_config, room_on_device
from mallee.protocol.errors import ConfigError
from mallee.runtime.config import AppConfig, problems, put, servers
from mallee.worker.speculation.speculator import SpeculationConfig


def make(**settings: Any) -> AppConfig:
    """Settings by dotted keys, with __ for the dot."""
    values: dict[str, Any] = {"model": "m"}
    for key, value in settings.items():
        put(values, key.replace("__", "."), value)
    return AppConfig.model_validate(values)


def refused(**settings: Any) -> list[tuple[str, str]]:
    with pytest.raises(ValidationError) as caught:
        make(**settings)
    return list(problems(caught.value, AppConfig))


def test_unknown_keys_are_refused_all_at_once_each_with_the_nearest() -> None:
    assert refused(wrokers=2, routing__polciy="cost", ray__x=1, gang=False) == [
        ("", "`routing.polciy` is no setting; the nearest is `routing.policy`"),
        (
            "",
            "`ray.x` is no setting; there are worker_cpus, worker_gpus, worker_resources, gateway_resources",
        ),
        ("", "`wrokers` is no setting; the nearest is `workers`"),
        ("", "`gang` is no setting; the nearest is `experimental.gang`"),
    ]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("admission.max_queued", -1),
        ("admission.max_queued_per_tenant", -1),
        ("admission.max_queue_wait_s", 0),
        ("admission.busy_rows_ratio", 0),
        ("admission.tenant_weights.acme", 0),
        ("admission.tenant_weights.acme", float("inf")),
        ("routing.policy", "kv"),
        ("engine.kv_dtype", "fp4"),
        ("engine.kv_gib", 0),
    ],
)
def test_a_value_out_of_range_is_refused_by_its_dotted_key(path: str, value: object) -> None:
    ((key, sentence),) = refused(**{path: value})
    assert key == path
    assert sentence.startswith(f"={value!r}: Input should be ")


@pytest.mark.parametrize("origin", ["http://localhost:3000/", "localhost:3000", ""])
def test_an_origin_that_no_browser_sends_is_refused(origin: str) -> None:
    """A browser's has no path; another would never match, and nothing would say so."""
    ((key, _),) = refused(http__cors_origins=[origin])
    assert key == "http.cors_origins.0"


@pytest.mark.parametrize(
    "settings",
    [
        {"mock__speedup": 2.0},
        {"mock__engines_per_worker": 2},
        {"engine__kind": "mock", "engine__kv_dtype": "fp8"},
        {"engine__kind": "mock", "engine__threads": 2},
        {"engine__kind": "mock", "experimental__kv_checks": "guards"},
        {"engine__kind": "mock", "mock__engines_per_worker": 50, "routing__max_workers": 49},
        {"engine__block_size": 32, "engine__kv_tokens": 31},
        {"autoscaling__min_workers": 2},
        {"autoscaling__target_rows": 0.5},
        {"autoscaling__max_workers": 2, "autoscaling__min_workers": 3},
        {"autoscaling__max_workers": 3, "autoscaling__min_workers": 2, "workers": 1},
        {"autoscaling__max_workers": 3, "workers": 4},
        {"autoscaling__max_workers": 2000, "routing__max_workers": 1999},
        {"engine__device_share": 0.5},
        {"nats_credentials": "/file"},
        {"nats_ca": "/file"},
        {"store__replicas": 3},
        {"nats_url": "ws://host"},
        {"nats_url": "nats://a,"},
        {"nats_url": "nats://a:4222/x, nats://b"},
        {"nats_url": "nats://a:port"},
        {"nats_url": "tls://a, nats://b"},
        {"nats_url": "tls://a, b"},
        {"nats_url": "nats://host", "nats_worker_credentials": "/file"},
    ],
)
def test_settings_that_mean_nothing_together_are_refused(settings: dict[str, Any]) -> None:
    ((key, sentence),) = refused(**settings)
    assert key == ""
    assert sentence.startswith(next(reversed(settings)).replace("__", "."))


def test_a_larger_fleet_has_more_room_and_rarer_leases() -> None:
    large = make(engine__kind="mock", mock__engines_per_worker=5000)
    assert (large.worker_room, large.lease_interval_s) == (6250, 2.0)
    small = make(workers=3)
    assert (small.worker_room, small.lease_interval_s) == (1024, 1.0)
    assert make(lease_period_s=0.5).lease_interval_s == 0.5
    growing = make(autoscaling__max_workers=2000)
    assert (growing.num_workers, growing.worker_room) == (1, 2500)


def test_kv_memory_in_tokens_is_whole_blocks() -> None:
    assert make().num_blocks is None
    assert make(engine__kv_tokens=100, engine__block_size=16).num_blocks == 6
    assert make(engine__kind="mock").num_blocks == 16_384


def test_kv_memory_is_sized_by_the_device_where_nothing_else_says_it() -> None:
    """X29, part: on a CPU it stays 1 GiB."""
    cuda: dict[str, Any] = {"engine__device": "cuda"}
    assert make().kv_nbytes == 1 << 30
    assert make(**cuda).kv_nbytes is None
    assert make(**cuda, engine__kv_gib=2).kv_nbytes == 2 << 30
    assert make(**cuda, engine__device_share=0.5).kv_nbytes is None
    for given in ({"engine__kv_gib": 2}, {"engine__kv_tokens": 4096}):
        ((_, sentence),) = refused(**cuda, engine__device_share=0.5, **given)
        assert sentence.startswith("engine.device_share beside engine.kv_")


def test_an_api_key_is_no_setting_and_its_refusal_does_not_show_it() -> None:
    for given in ({"http": {"api_key": "hush"}}, {"api_key": "hush"}):
        with pytest.raises(ValidationError) as caught:
            AppConfig.model_validate({"model": "m", **given})
        shown = f"{caught.value} {list(problems(caught.value, AppConfig))}"
        assert "MALLEE_API_KEY" in shown
        assert "hush" not in shown


def test_settings_survive_json() -> None:
    config = make(engine__kind="mock", admission__tenant_weights={"a": 2.0}, lease_period_s=0.1)
    assert AppConfig.model_validate_json(config.model_dump_json()) == config
    with pytest.raises(ConfigError, match="model has a value of its own"):
        put({"model": "m"}, "model.name", 1)


def test_several_servers_of_the_broker_stand_between_commas() -> None:
    config = make(nats_url="nats://a:4222, b , nats://[::1]:4223")
    assert servers(config.nats_url or "") == ["nats://a:4222", "nats://b", "nats://[::1]:4223"]


def test_credentials_in_the_brokers_url_are_refused_and_not_shown() -> None:
    """Ray Serve shows `args` in its configuration, its REST API and its logs."""
    for url in ("nats://user:hush@host:4222", "hush@host", "tls://hush@host", "a,u:hush@b"):
        ((key, sentence),) = refused(nats_url=url)
        assert key == ""
        assert "give its path as nats_credentials" in sentence
        with pytest.raises(ValidationError) as caught:
            AppConfig.model_validate({"model": "m", "nats_url": url})
        assert "hush" not in f"{sentence} {caught.value} {list(problems(caught.value, AppConfig))}"


@pytest.mark.parametrize(("value", "nbytes"), [("off", 0), (False, 0), ("auto", 512 << 20)])
def test_graphs_are_off_as_yaml_reads_it_too(value: Any, nbytes: int) -> None:
    """I13, part: a worker's room then has nothing for them."""
    settings = make(engine__cuda_graphs=value, engine__device="cuda")
    assert room_on_device(settings).graphs == nbytes
    assert "'auto' or 'off'" in refused(engine__cuda_graphs="on")[0][1]


@pytest.mark.parametrize("value", ["off", False])
def test_speculation_is_off_as_yaml_reads_it_too(value: Any) -> None:
    """I15, part: drafters and the most tokens of a draft are settings of the engine."""
    settings = make(engine__speculation=value)
    assert engine_config(settings).speculation == SpeculationConfig("off", 5)
    settings = make(engine__speculation="auto", engine__num_speculative_tokens=3)
    assert engine_config(settings).speculation == SpeculationConfig("auto", 3)
    assert (
        "'off', 'prompt', 'sibling', 'model' or 'auto'"
        in refused(engine__speculation="medusa")[0][1]
    )
