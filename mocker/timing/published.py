"""Published measurements, read and fitted: where `fitted.json` comes from.

The tables are those of NVIDIA aiconfigurator 0.12.0 (Apache-2.0): measured kernels, summed for one pass
of vLLM, without what the engine adds. For GB10 there is no table, only single figures quoted in public;
its profiles are a guess: the roofline of the model on that machine, scaled to those figures.

Some cells of the tables are slower than cells with more work (on B200 in fp8 a batch of 1 by half).
A smaller pass can't cost more than a larger one, so before fitting each cell is cut to the lowest cost of
the cells with at least as much work. Errors are relative to the tables as they are.
"""

import csv
import gzip
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple, TypeVar

import msgspec
import numpy as np

from mallee.mocker.timing.closed import ClosedForm, Plane
from mallee.mocker.timing.dynamo import DynamoTable, from_arrays
from mallee.mocker.timing.files import ClosedData, ExpertsData, closed_data, experts_data
from mallee.mocker.timing.fit import (
    Decode,
    Errors,
    Prefill,
    decode_errors,
    fit_closed_form,
    fit_experts,
    prefill_errors,
)
from mallee.mocker.timing.profiles import Fitted
from mallee.protocol.errors import ConfigError

AICONFIGURATOR = "aiconfigurator_static_vllm.csv.gz"
GB10 = "gb10_public_points.csv"
_SWEPT = {
    "dynamo_preswept_prefill.csv": {"prefill_isl": "isl", "prefill_ttft": "ttft_ms"},
    "dynamo_preswept_decode.csv": {
        "x_kv_usage": "kv_usage",
        "y_context_length": "context_length",
        "z_itl": "itl_ms",
        "max_kv_tokens": "max_kv_tokens",
    },
}
GPUS = {
    "h100_sxm": ("h100", 80),
    "h200_sxm": ("h200", 141),
    "b200_sxm": ("b200", 180),
}
"""Short name and memory in GB of those that are fitted."""

Data = TypeVar("Data", ClosedData, ExpertsData)
Point = TypeVar("Point", Prefill, Decode)

_DIGITS = 6
_GB10_BANDWIDTH = 273e9  # bytes a second
_KV_SHARE = 0.9  # of the memory that weights leave


class Shape(NamedTuple):
    """Shape of a model for its cost: a token of context is 2 * layers * kv_heads * head_dim values."""

    name: str
    num_params: float
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    expert_share: float | None = None

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values in bf16."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * 2

    @property
    def pair_flops(self) -> float:
        """Attention of one new token to one before it, all layers."""
        return 4.0 * self.num_layers * self.num_heads * self.head_dim


SHAPES = {
    "meta-llama/Meta-Llama-3.1-8B": Shape("llama-3.1-8b", 8.03e9, 32, 32, 8, 128),
    "meta-llama/Meta-Llama-3.1-70B": Shape("llama-3.1-70b", 70.6e9, 80, 64, 8, 128),
    "Qwen/Qwen3-8B": Shape("qwen3-8b", 8.19e9, 36, 32, 8, 128),
    "Qwen/Qwen3-32B": Shape("qwen3-32b", 32.8e9, 64, 64, 8, 128),
    "Qwen/Qwen3-30B-A3B": Shape("qwen3-30b-a3b", 30.5e9, 48, 32, 4, 128, 8 / 128),
}


def fit_published(folder: Path) -> dict[str, Fitted]:
    """All profiles that the files in `folder` give, by name."""
    return dict(sorted([*_aiconfigurator(folder / AICONFIGURATOR), *_gb10(folder / GB10)]))


def dynamo_swept(folder: Path, gpu: str, tp: int) -> DynamoTable:
    """Measurements of vLLM 0.10.1 by Dynamo's profiler, as its mocker takes it; `save` writes its NPZ.

    Raises ConfigError if it was not measured there.
    """
    columns: dict[str, list[float]] = {}
    for name, taken in _SWEPT.items():
        with (folder / name).open() as file:
            for row in csv.DictReader(file):
                if row["gpu"] == gpu and row["tp"] == str(tp):
                    for key, column in taken.items():
                        columns.setdefault(key, []).append(float(row[column]))
    if "prefill_isl" not in columns:
        raise ConfigError(f"gpu={gpu!r}, tp={tp}: not in {', '.join(_SWEPT)}")
    columns["max_kv_tokens"] = columns["max_kv_tokens"][:1]
    return from_arrays({key: np.array(values) for key, values in columns.items()})


def _aiconfigurator(path: Path) -> Iterator[tuple[str, Fitted]]:
    points: dict[tuple[str, str, int, str], tuple[list[Prefill], list[Decode]]] = {}
    with gzip.open(path, "rt") as file:
        for row in csv.DictReader(file):
            if row["system"] not in GPUS:
                continue
            key = (row["system"], row["model"], int(row["tp"]), row["quant"])
            prefills, decodes = points.setdefault(key, ([], []))
            seconds, context = float(row["latency_ms"]) / 1000, int(row["prefix_or_ctx"])
            if row["phase"] == "prefill":
                prefills.append(Prefill(int(row["new_tokens"]), context, seconds))
            else:
                batch = int(row["batch"])
                decodes.append(Decode(batch, float(batch * context), seconds))
    for (system, model_name, tp, quant), (prefills, decodes) in points.items():
        gpu, memory_gb = GPUS[system]
        shape = SHAPES[model_name]
        model: ClosedData | ExpertsData
        clean = without_outliers(prefills), without_outliers(decodes)
        if shape.expert_share is None:
            model = rounded(closed_data(fit_closed_form(*clean)))
        else:
            model = rounded(experts_data(fit_experts(*clean, shape.expert_share)))
        form = model.model()
        yield (
            f"{gpu}-{shape.name}-{quant}",
            Fitted(
                gpu=gpu,
                model_name=model_name,
                tp=tp,
                quant=quant,
                source="aiconfigurator 0.12.0, vLLM 0.24.0",
                is_guess=False,
                kv_bytes_per_token=shape.kv_bytes_per_token,
                kv_tokens=kv_tokens(shape, quant, memory_gb * tp),
                prefill_error=_rounded_errors(prefill_errors(form, prefills)),
                decode_error=_rounded_errors(decode_errors(form, decodes)),
                model=model,
            ),
        )


def without_outliers(points: Sequence[Point]) -> list[Point]:
    """`points` with no time above that of a point that is at least as large in both sizes."""
    sizes = np.array(
        [(n, m if isinstance(p, Prefill) else m / n) for p in points for n, m in [p[:2]]]
    )
    seconds = np.array([point.seconds for point in points])
    larger = (sizes[None, :, :] >= sizes[:, None, :]).all(axis=2)  # [point, other]
    least = np.where(larger, seconds[None, :], np.inf).min(axis=1)
    return [p._replace(seconds=s) for p, s in zip(points, least.tolist(), strict=True)]


_BYTES = {"bf16": 2.0, "fp8": 1.0, "nvfp4": 4.5 / 8}
"""Per weight."""
_OSS = Shape("gpt-oss-20b", 3.6e9, 12, 64, 8, 64)  # active weights; layers with full attention
_OSS_BYTES = 4.25 / 8


def _gb10(path: Path) -> Iterator[tuple[str, Fitted]]:
    """Dense models on GB10 by roofline: how much of it the quoted figures reach is applied to all."""
    with path.open() as file:
        rows = [row for row in csv.DictReader(file) if row["unit"] == "tokens/s"]
    oss = {
        (row["phase"], int(row["context_depth"])): float(row["value"])
        for row in rows
        if row["model"] == _OSS.name and row["engine"].startswith("llama.cpp b")
    }
    # Seconds for the weights by the roofline, over seconds measured.
    reached = [_OSS.num_params * _OSS_BYTES / _GB10_BANDWIDTH * oss["decode", 0]]
    llama = SHAPES["meta-llama/Meta-Llama-3.1-8B"]
    reached += [
        llama.num_params * _BYTES[row["quant"].lower()] / _GB10_BANDWIDTH * float(row["value"])
        for row in rows
        if row["model"] == "Llama-3.1-8B" and row["phase"] == "decode"
    ]
    share = median(reached)
    flop_s = 1 / (oss["prefill", 0] * 2 * _OSS.num_params)
    depth = 16384
    pair_flop_s = (1 / oss["prefill", depth] - 1 / oss["prefill", 0]) / depth / _OSS.pair_flops
    for model_name, shape in SHAPES.items():
        if shape.expert_share is not None or shape.num_params > 20e9:
            continue
        for quant in ("fp8", "nvfp4"):
            weights_s = shape.num_params * _BYTES[quant] / _GB10_BANDWIDTH / share
            token_s = shape.kv_bytes_per_token / _GB10_BANDWIDTH / share
            flops_s = 2 * shape.num_params * flop_s
            form = ClosedForm(
                weights_s,
                flops_s,
                shape.pair_flops * pair_flop_s,
                token_s,
                (Plane(weights_s, flops_s, token_s),),
            )
            yield (
                f"gb10-{shape.name}-{quant}",
                Fitted(
                    gpu="gb10",
                    model_name=model_name,
                    tp=1,
                    quant=quant,
                    source="roofline at 273 GB/s, scaled to public single figures",
                    is_guess=True,
                    kv_bytes_per_token=shape.kv_bytes_per_token,
                    kv_tokens=kv_tokens(shape, quant, 128),
                    prefill_error=None,
                    decode_error=None,
                    model=rounded(closed_data(form)),
                ),
            )


def kv_tokens(shape: Shape, quant: str, memory_gb: int) -> int:
    """Tokens whose KV fits beside the weights, in thousands."""
    room = _KV_SHARE * memory_gb * 1e9 - shape.num_params * _BYTES[quant]
    return int(room / shape.kv_bytes_per_token / 1000) * 1000


def rounded(data: Data) -> Data:
    """`data` with its figures cut to six digits, so that the file stays small and stable."""
    text = msgspec.to_builtins(data)
    return msgspec.convert(_cut(text), type(data))


def _cut(value: object) -> object:
    match value:
        case float():
            return float(f"{value:.{_DIGITS}g}")
        case dict():
            return {key: _cut(each) for key, each in value.items()}
        case list() | tuple():
            return [_cut(each) for each in value]
        case _:
            return value


def _rounded_errors(errors: Errors) -> Errors:
    median_, p95, worst, bias, num_points = errors
    return Errors(round(median_, 4), round(p95, 4), round(worst, 4), round(bias, 4), num_points)
