"""The load of a vLLM pod, from the few lines of its `/metrics` that a router needs."""

import re
from typing import Final, NamedTuple

MAX_NBYTES: Final = 4 << 20  # of a page of metrics

_WANTED: Final = (
    "vllm:num_requests_waiting",
    "vllm:num_requests_running",
    "vllm:kv_cache_usage_perc",
    "vllm:gpu_cache_usage_perc",  # its name before vLLM 0.10
    "vllm:cache_config_info",
    "vllm:lora_requests_info",
    "vllm:request_prompt_tokens_sum",
    "vllm:request_prompt_tokens_count",
    "process_start_time_seconds",
)
_LINE = re.compile(r"(?P<name>[A-Za-z_:][A-Za-z0-9_:]*)(?:\{(?P<labels>.*)\})? +(?P<value>\S+)")
_LABEL = re.compile(r'([A-Za-z_][A-Za-z0-9_]*)="((?:[^"\\]|\\.)*)"')


class PodReport(NamedTuple):
    """A pod's own figures. Counts are summed over its engines; None: it does not say."""

    running: int
    waiting: int
    kv_usage: float  # 0 to 1, of the fullest engine
    mean_prompt_tokens: float
    block_size: int | None
    num_blocks: int | None
    model: str | None
    adapters: tuple[str, ...]
    started_at: float | None  # seconds since the epoch

    @property
    def incarnation(self) -> int:
        """The pod's life, alike for all pickers: larger means younger; 1: unknown."""
        return 1 if self.started_at is None else max(1, round(self.started_at * 1000))


def read_metrics(text: str) -> PodReport | None:
    """The report in a page of Prometheus' text format; None if it is not vLLM's."""
    sums = dict.fromkeys(_WANTED, 0.0)
    usage, started_at, is_vllm = 0.0, None, False
    config: dict[str, str] = {}
    model, adapters = None, set[str]()
    for line in text.splitlines():
        if not line.startswith(_WANTED) or (match := _LINE.match(line)) is None:
            continue
        name, value = match["name"], _number(match["value"])
        if name not in sums or value is None:
            continue
        labels = dict(_LABEL.findall(match["labels"] or ""))
        is_vllm = is_vllm or name == "vllm:num_requests_waiting"
        model = model or labels.get("model_name")
        sums[name] += value
        if name.endswith("cache_usage_perc"):
            usage = max(usage, value)
        elif name == "vllm:cache_config_info":
            config |= labels
        elif name == "vllm:lora_requests_info":
            for key in ("running_lora_adapters", "waiting_lora_adapters"):
                adapters.update(filter(None, map(str.strip, labels.get(key, "").split(","))))
        elif name == "process_start_time_seconds":
            started_at = value
    if not is_vllm:
        return None
    count = sums["vllm:request_prompt_tokens_count"]
    return PodReport(
        running=int(sums["vllm:num_requests_running"]),
        waiting=int(sums["vllm:num_requests_waiting"]),
        kv_usage=min(1.0, usage),
        mean_prompt_tokens=sums["vllm:request_prompt_tokens_sum"] / count if count else 0.0,
        block_size=_count(config.get("block_size")),
        num_blocks=_count(config.get("num_gpu_blocks")),
        model=model,
        adapters=tuple(sorted(adapters)),
        started_at=started_at,
    )


def _number(text: str) -> float | None:
    """A value that can be counted with: finite and not negative."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0.0 <= value < float("inf") else None


def _count(text: str | None) -> int | None:
    """A positive number of a label; vLLM writes None where it has none."""
    return int(text) if text and text.isascii() and text.isdigit() and int(text) > 0 else None
