"""`mallee top` of given answers, and services that are not there."""

import pytest
from click.testing import Result
from rich.console import Console
from typer.testing import CliRunner

from mallee.actors.addresses import free_port
from mallee.cli.main import cli
from mallee.cli.remote.fleet import Answers, Metrics, Sample, draw
from mallee.protocol.errors import ConfigError


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, list(arguments))


def sample(at: float, tokens: float, active: int = 0, gateway: str = "g0") -> Sample:
    worker = {
        **{"worker": "w0", "state": "ready", "active_blocks": active, "num_blocks": 100, "rows": 3},
        **{"waiting": 1, "prefill_tokens": 5, "indexed_blocks": 9, "lease_age_s": 0.5},
        **{"weight_version": "base", "device": "NVIDIA H100"},
    }
    health = {"status": "degraded", "gateway": gateway, "broker": "down", "workers": [{}]}
    metrics = f'mallee_output_tokens_total{{gateway="{gateway}"}} {tokens}'
    return Sample.of(at, Answers(health, [worker], metrics))


def test_speeds_are_of_the_time_between_two_looks() -> None:
    before, now = sample(10.0, 100.0), sample(12.0, 400.0, active=95)
    assert now.rates(before)["output tokens/s"] == 150.0
    assert sample(14.0, 5.0).rates(now)["output tokens/s"] == 0.0  # the gateway began anew
    assert now.rates(None) == {}
    assert now.rates(sample(11.0, 100.0, gateway="g1")) == {}  # another's counters
    console = Console(width=100)
    with console.capture() as shown:
        console.print(draw(now, now.rates(before)))
    lines = shown.get().splitlines()
    assert "mallee degraded  gateway g0, broker down, 1 workers" in lines[0]
    assert "output tokens/s 150" in lines[1]
    assert lines[3].split() == [
        *("w0", "ready", "██████████", "95%", "3", "1", "5", "9", "0.5", "s", "base"),
        *("NVIDIA", "H100"),
    ]


@pytest.mark.parametrize("command", ["top", "explain", "workers"])
def test_a_service_that_is_not_there_is_told(command: str) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    answer = run(command, "--url", url)
    assert isinstance(answer.exception, ConfigError)
    assert url in str(answer.exception)


def test_answers_are_those_that_generate() -> None:
    """Its own looks at the service, and capsules that are read, are none."""
    paths = {
        "/health": 50, "/metrics": 50, "/v1/router/workers": 50, "/v1/capsules/{capsule}": 9,
        "/v1/completions": 1, "/v1/chat/completions": 2, "/v1/capsules/{capsule}/fork": 3,
        "/v1/capsules/{capsule}/restore": 4,
    }  # fmt: skip
    lines = [
        f'mallee_http_answers_total{{endpoint="{path}",status="200"}} {num}'
        for path, num in paths.items()
    ]
    found = Metrics(
        "\n".join([*lines, 'mallee_capsules{gateway="g0",worker="w0"} 5', "mallee_x 1"])
    )
    totals = [
        found.total(f"mallee_{name}") for name in ("http_answers_total", "capsules", "x", "y")
    ]
    assert totals == [10.0, 5.0, 1.0, 0.0]


def test_counters_are_told_by_label() -> None:
    lines = (
        'mallee_worker_capsules{gateway="g1",tier="0",worker="w0"} 2',
        'mallee_worker_capsules{gateway="g1",tier="1",worker="w0"} 3',
        'mallee_worker_capsules{gateway="g1",tier="0",worker="w1"} 4',
    )
    found = Metrics("\n".join(lines))
    assert found.gateway == "g1"
    assert found.by("mallee_worker_capsules", "worker") == {"w0": 5.0, "w1": 4.0}
    assert found.by("mallee_worker_capsules", "tier") == {"0": 6.0, "1": 3.0}
    assert found.by("mallee_none", "tier") == {}


def test_answers_of_another_program_are_refused() -> None:
    with pytest.raises(ConfigError, match="not a list of workers"):
        Sample.of(0.0, Answers({}, [{"worker": 3}], ""))
