"""Latencies of engines, as Prometheus text."""

from prometheus_client import CollectorRegistry

from mallee.protocol.messages import ALL_BRANCHES, Update
from mallee.runtime.telemetry.engines import EngineMeter, EngineMeters
from mallee.runtime.telemetry.families import Families


def made() -> tuple[CollectorRegistry, EngineMeter]:
    registry = Families()
    return registry, EngineMeters(registry).meter("m", "w0")


def read(registry: CollectorRegistry, name: str) -> float:
    value = registry.get_sample_value(f"vllm:{name}", {"model_name": "m", "engine": "w0"})
    assert value is not None
    return value


def test_first_tokens_and_gaps_are_those_of_each_branch() -> None:
    """I23, part: two branches of one request, several tokens at once by their mean; not those of others."""
    registry, meter = made()
    meter.asked("g0", "r", 10.0)
    meter.asked("g0", "r", 11.0)  # it has begun only once
    meter.took("g0", [Update("r", 0, (1,)), Update("r", 1, (1,))], 10.5)
    meter.took("g0", [Update("r", 0, (2,)), Update("r", 1), Update("unknown", 0, (1,))], 10.7)
    meter.took("g1", [Update("r", 0, (2,))], 10.8)
    meter.took("g0", [Update("r", 1, (2, 3, 4, 5), "length")], 11.3)
    assert read(registry, "time_to_first_token_seconds_count") == 2
    assert read(registry, "time_to_first_token_seconds_sum") == 1.0
    assert read(registry, "inter_token_latency_seconds_count") == 2
    assert round(read(registry, "inter_token_latency_seconds_sum"), 6) == 0.2 + 0.2


def test_requests_that_are_over_are_forgotten() -> None:
    _, meter = made()
    for gateway in ("g0", "g1"):
        for request in ("a", "b"):
            meter.asked(gateway, request, 0.0)
    meter.took("g0", [Update("a", ALL_BRANCHES, finish="error")], 1.0)
    meter.over("g0", "a")
    assert set(meter._open) == {("g0", "b"), ("g1", "a"), ("g1", "b")}
    meter.dropped("g1")
    assert set(meter._open) == {("g0", "b")}
    meter.dropped()
    assert not meter._open
