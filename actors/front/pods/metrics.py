"""The load of a vLLM pod, from the few lines of its `/metrics` that a router needs."""

import re
from typing import Final, NamedTuple

import msgspec

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
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
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
    is_vllm: bool = True
    queried_tokens: int = 0  # of prompts that its prefix cache was asked for, so far
    cached_tokens: int = 0  # those of them that it had

    @property
    def incarnation(self) -> int:
        """The pod's life, alike for all pickers: larger means younger; 1: unknown."""
        return 1 if self.started_at is None else max(1, round(self.started_at * 1000))


NO_REPORT: Final = PodReport(
    running=0,
    waiting=0,
    kv_usage=0.0,
    mean_prompt_tokens=0.0,
    block_size=None,
    num_blocks=None,
    model=None,
    adapters=(),
    started_at=None,
    is_vllm=False,
)
"""Of a server without vLLM's metrics: it is loaded as we load it."""


class PodModels(NamedTuple):
    """The models that a pod serves, by its `/v1/models`."""

    names: tuple[str, ...] = ()
    adapters: tuple[str, ...] = ()
    max_model_len: int = 0  # of the shortest; 0: it does not say


NO_MODELS: Final = PodModels()


def read_models(text: str) -> PodModels:
    """The list of an OpenAI API; of another page nothing."""
    try:
        listed = msgspec.json.decode(text, type=_ModelList).data
    except (msgspec.DecodeError, UnicodeDecodeError):
        return NO_MODELS
    lengths = [each.max_model_len for each in listed if each.max_model_len]
    return PodModels(
        names=tuple(each.id for each in listed if not each.parent),
        adapters=tuple(each.id for each in listed if each.parent),
        max_model_len=min(lengths, default=0),
    )


class _Model(msgspec.Struct):
    id: str
    parent: str | None = None
    max_model_len: int | None = None


class _ModelList(msgspec.Struct):
    data: list[_Model] = []


def read_metrics(text: str) -> PodReport:
    """The report in a page of Prometheus' text format."""
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
        is_vllm=is_vllm,
        queried_tokens=int(sums["vllm:prefix_cache_queries_total"]),
        cached_tokens=int(sums["vllm:prefix_cache_hits_total"]),
    )


def _number(text: str) -> float | None:
    """A value that can be counted with: exact, and not negative."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0.0 <= value < 1 << 53 else None


def _count(text: str | None) -> int | None:
    """A positive number of a label; vLLM writes None where it has none."""
    return int(text) if text and re.fullmatch("[1-9][0-9]{0,8}", text) else None
