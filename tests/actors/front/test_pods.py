"""Reports of pods, and the lists of them: metrics, settings, files."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from bench.doubles.vllm_pod import encode_batch
from mallee.actors.front.http.backends import Backends
from mallee.actors.front.pods.endpoints import (
    Endpoint,
    ListedEndpoints,
    checked_target,
)
from mallee.actors.front.pods.kv_events import PodContents
from mallee.actors.front.pods.metrics import NO_REPORT, read_metrics
from mallee.actors.front.pods.pods import PodLimits, Pods, _Pod
from mallee.protocol.errors import ConfigError
from mallee.router.config import RouterConfig
from mallee.router.router import Router
from support.waiting import elapse, until

PAGE = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="meta/llama"} 3.0
vllm:num_requests_running{engine="1",model_name="meta/llama"} 2.0
vllm:num_requests_waiting{engine="0",model_name="meta/llama"} 1.0
vllm:num_requests_waiting{engine="1",model_name="meta/llama"} 4.0
vllm:kv_cache_usage_perc{engine="0",model_name="meta/llama"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="meta/llama"} 0.5
vllm:cache_config_info{block_size="32",cache_dtype="auto",num_gpu_blocks="7000",a="b\\"c,}"} 1.0
vllm:lora_requests_info{max_lora="4",running_lora_adapters="a, b",waiting_lora_adapters="c"} 1.7e9
vllm:request_prompt_tokens_bucket{le="1.0",model_name="meta/llama"} 0.0
vllm:request_prompt_tokens_count{engine="0",model_name="meta/llama"} 10.0
vllm:request_prompt_tokens_sum{engine="0",model_name="meta/llama"} 5000.0
process_start_time_seconds 1.7000000005e+09
"""


def test_a_page_of_vllms_metrics_is_read() -> None:
    """Sums over its engines, labels with quotes in them, numbers as Prometheus writes them."""
    report = read_metrics(PAGE)
    assert report.is_vllm
    assert (report.running, report.waiting, report.kv_usage) == (5, 5, 0.5)
    assert (report.block_size, report.num_blocks) == (32, 7000)
    assert report.mean_prompt_tokens == 500
    assert report.model == "meta/llama"
    assert report.adapters == ("a", "b", "c")
    assert report.incarnation == 1_700_000_000_500


def test_what_a_pod_does_not_say_is_not_made_up() -> None:
    lines = (
        "vllm:num_requests_waiting 0",
        "vllm:gpu_cache_usage_perc 0.5",
        'vllm:cache_config_info{num_gpu_blocks="None"} 1',
    )
    report = read_metrics("\n".join(lines))
    assert (report.kv_usage, report.num_blocks, report.block_size) == (0.5, None, None)
    assert report.incarnation == 1
    assert read_metrics("go_goroutines 7\n") == NO_REPORT
    nonsense = "vllm:num_requests_waiting NaN\nvllm:num_requests_waiting -3\n{}{}{}\n"
    assert read_metrics(nonsense) == NO_REPORT
    huge = "vllm:num_requests_running 1e308\n" * 2
    huge += f'vllm:cache_config_info{{num_gpu_blocks="{"9" * 5000}"}} 1\n'
    assert read_metrics(huge) == NO_REPORT


@pytest.mark.parametrize(
    "address",
    ["10.0.0.1", "10.0.0.1:0", "10.0.0.1:99999", "https://a:1", "http://a:1/v1", "a b:1", 7, ""],
)
def test_addresses_are_host_and_port_and_others_are_refused_by_name(address: object) -> None:
    for sound in ("10.0.0.1:8000", "[fd00::1]:80", "pod-1.models:80"):
        for written in (sound, f"http://{sound}", f"http://{sound}/"):
            assert checked_target(written).address == sound
        assert f"{Endpoint(sound).host}:{sound.rpartition(':')[2]}" == sound
    with pytest.raises(ConfigError, match="give ip:port or host:port"):
        checked_target(address)
    with pytest.raises(ConfigError):
        ListedEndpoints([address])  # type: ignore[list-item]


def test_an_engine_whose_metrics_are_not_vllms_is_known_by_its_events() -> None:
    """As SGLang's: the state that is shown is the one that is routed by."""
    limits = PodLimits(16, 64, 4, 1.0, events_port=None, replay_port=None, topic="")
    router = Router(RouterConfig(), clock=lambda: 0.0)
    found = Pods(router, Backends(1.0), None, limits, max_pods=1, on_join=lambda *_: None)
    pod = _Pod(Endpoint("a:1"), PodContents(16, max_blocks=9), NO_REPORT, failure="")
    order = pod.contents.follow(0, can_replay=False)
    assert found.knowledge(pod) == ("predicted", "its /metrics are not vLLM's")
    pod.contents.take(order.on_live(0, encode_batch([], is_positional=False)))
    assert found.knowledge(pod) == ("exact", "")


async def test_a_file_of_endpoints_is_followed_and_a_broken_one_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "pods.yaml"
    file.write_text("- 10.0.0.1:80\n")
    seen: list[list[str]] = []

    def note(endpoints: Sequence[Endpoint]) -> None:
        seen.append([each.address for each in endpoints])

    source = ListedEndpoints(file, look_s=0.01)
    task = asyncio.create_task(source.follow(note))
    await until(lambda: seen == [["10.0.0.1:80"]])
    file.write_text("[10.0.0.1:80, 10.0.0.2:80]")  # YAML reads such as text: 10.0.0.2:80
    await until(lambda: len(seen) == 2)
    assert seen[1] == ["10.0.0.1:80", "10.0.0.2:80"]
    for broken in ("- pod", "a: b", "{"):
        caplog.clear()
        file.write_text(broken)
        await until(lambda: "stay as they were" in caplog.text)
    file.unlink()
    await elapse(0.05)
    assert len(seen) == 2
    file.write_text("[]")
    await until(lambda: seen[-1] == [])
    task.cancel()
    with pytest.raises(ConfigError, match="No such file"):
        ListedEndpoints(tmp_path / "none")
