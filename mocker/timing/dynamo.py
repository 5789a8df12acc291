"""Dynamo's mocker timing, for comparisons like for like: its polynomial and its NPZ tables.

Neither knows the cached prefix or the number of rows: both look at the share of the KV memory in use.
They are here to feed both mockers the same input; to predict an engine, take a grid or a closed form.

An NPZ file holds `prefill_isl`, `prefill_ttft` [num_points], and the decode times either as points
(`x_kv_usage`, `y_context_length`, `z_itl`, all [num_points], and `max_kv_tokens`) or as a grid
(`decode_active_kv_tokens` [n], `decode_context_length` [m], `decode_itl` [n, m]; `prefill_ttft_ms`).
Times are in milliseconds. Source: ai-dynamo/dynamo, planner profiles and mocker.
"""

import zlib
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from zipfile import BadZipFile, is_zipfile

import numpy as np

from mallee.mocker.timing.table import Axis, Floats, checked, monotone
from mallee.protocol.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Polynomial:
    """Dynamo's default. `kv_tokens` is what the whole KV memory holds: blocks times their size."""

    kv_tokens: int

    def __post_init__(self) -> None:
        if self.kv_tokens < 1:
            raise ConfigError(f"kv_tokens={self.kv_tokens}: give the tokens of the KV memory")

    @property
    def base_s(self) -> float:
        return 0.0

    def prefill_s(self, num_new: int, prefix: int) -> float:
        if not num_new:
            return 0.0
        return (4.209989e-7 * num_new * num_new + 1.518344e-2 * num_new + 16.50142) / 1000

    def decode_s(self, rows: int, context: float) -> float:
        if not rows:
            return 0.0
        used = min(1.0, context / self.kv_tokens)
        return ((-25.74 * used + 54.01) * used + 5.74) / 1000  # never below 1 ms, where Dynamo cuts

    def decodes_s(self, rows: int, context: float, num_steps: int) -> float:
        """In O(1): a sum of squares until the memory is full."""
        if not rows:
            return 0.0
        below = max(0, min(num_steps, -int((context - self.kv_tokens) // rows)))
        used, each = context / self.kv_tokens, rows / self.kv_tokens
        ones = below * (below - 1) / 2
        squares = ones * (2 * below - 1) / 3
        linear = below * used + each * ones
        square = used * (below * used + 2 * each * ones) + each * each * squares
        full_ms = (num_steps - below) * (-25.74 + 54.01 + 5.74)
        return (-25.74 * square + 54.01 * linear + 5.74 * below + full_ms) / 1000

    def pass_s(self, chunks: Sequence[tuple[int, int]], rows: int, context: float) -> float:
        """All new tokens of a pass count as one prompt; decodes come on top."""
        return self.prefill_s(sum(new for new, _ in chunks), 0) + self.decode_s(rows, context)


class DynamoTable:
    """Prefill linear over new tokens, decode bilinear over (KV tokens in use, mean context).

    Made monotone first: along tokens, and along KV tokens for each context. Clamped outside.
    Seconds and tokens. Raises ConfigError naming the key and the value that is wrong.
    """

    __slots__ = ("active", "context", "isl", "itl_s", "ttft_s")

    def __init__(
        self,
        isl: Sequence[float],
        ttft_s: Sequence[float],
        active: Sequence[float],
        context: Sequence[float],
        itl_s: Sequence[Sequence[float]],
    ) -> None:
        """`itl_s` [len(active)][len(context)]."""
        self.isl = Axis("prefill_isl", isl).points
        self.active = Axis("x_kv_usage", active).points
        self.context = Axis("y_context_length", context).points
        times = checked("prefill_ttft", ttft_s, above=0.0)
        if len(times) != len(self.isl):
            raise ConfigError(f"prefill_ttft: {len(times)} values, prefill_isl has {len(self.isl)}")
        if len(itl_s) != len(self.active):
            raise ConfigError(f"z_itl: {len(itl_s)} rows, x_kv_usage has {len(self.active)} values")
        rows = [checked(f"z_itl[{i}]", row, above=0.0) for i, row in enumerate(itl_s)]
        for i, row in enumerate(rows):
            if len(row) != len(self.context):
                raise ConfigError(
                    f"z_itl[{i}]: {len(row)} values, y_context_length has {len(self.context)}"
                )
        self.ttft_s: list[float] = monotone(np.array(times)).tolist()
        self.itl_s: list[list[float]] = np.apply_along_axis(monotone, 0, np.array(rows)).tolist()

    @property
    def base_s(self) -> float:
        return 0.0

    def prefill_s(self, num_new: int, prefix: int) -> float:
        if not num_new:
            return 0.0
        return float(np.interp(num_new, self.isl, self.ttft_s))

    def decode_s(self, rows: int, context: float) -> float:
        if not rows:
            return 0.0
        i = min(bisect_right(self.active, context), len(self.active) - 1)
        pair = [
            np.interp(context / rows, self.context, self.itl_s[at]) for at in (max(0, i - 1), i)
        ]
        return float(np.interp(context, (self.active[max(0, i - 1)], self.active[i]), pair))

    def pass_s(self, chunks: Sequence[tuple[int, int]], rows: int, context: float) -> float:
        """As `Polynomial.pass_s`."""
        return self.prefill_s(sum(new for new, _ in chunks), 0) + self.decode_s(rows, context)


def load_npz(path: Path) -> DynamoTable:
    """The table in an NPZ file of Dynamo. Raises ConfigError naming the file and what is wrong."""
    try:
        if not is_zipfile(path):
            raise BadZipFile("no zip file")
        with np.load(path, allow_pickle=False) as file:
            arrays = {key: np.asarray(file[key]) for key in file.files}
    except (OSError, ValueError, EOFError, BadZipFile, zlib.error) as error:
        raise ConfigError(f"{path}: no NPZ file of plain numbers: {error}") from error
    try:
        return from_arrays(arrays)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.message}") from error


def from_arrays(arrays: Mapping[str, Floats]) -> DynamoTable:
    """The table in the arrays of an NPZ file, times in milliseconds."""
    isl = _array(arrays, "prefill_isl", 1)
    ttft = _array(arrays, "prefill_ttft_ms" if "prefill_ttft" not in arrays else "prefill_ttft", 1)
    if "decode_itl" in arrays:
        active = _array(arrays, "decode_active_kv_tokens", 1)
        context = _array(arrays, "decode_context_length", 1)
        itl = _array(arrays, "decode_itl", 2)
    else:
        capacity = _capacity(arrays)
        usage = _array(arrays, "x_kv_usage", 1)
        lengths, times = _array(arrays, "y_context_length", 1), _array(arrays, "z_itl", 1)
        for name, array in (("y_context_length", lengths), ("z_itl", times)):
            if len(array) != len(usage):
                raise ConfigError(f"{name}: {len(array)} values, x_kv_usage has {len(usage)}")
        active, context, itl = gridded(usage * capacity, lengths, times)
    return DynamoTable(
        isl.tolist(),
        (ttft / 1000).tolist(),
        active.tolist(),
        context.tolist(),
        (itl / 1000).tolist(),
    )


def gridded(active: Floats, context: Floats, itl: Floats) -> tuple[Floats, Floats, Floats]:
    """Points that lie on one curve per context, each with KV tokens of its own, as one grid.

    Returns all KV tokens [n], contexts [m] and times [n, m]: each curve at all KV tokens, linear
    between its points, flat before them, and after them rising as the curve of the next shorter
    context does: long contexts have few points, the last of them at any height.
    """
    contexts, tokens = np.unique(context), np.unique(active)
    grid = np.empty((len(tokens), len(contexts)))
    for j, length in enumerate(contexts):
        chosen = np.flatnonzero(context == length)
        ordered = chosen[np.argsort(active[chosen], kind="stable")]
        grid[:, j] = np.interp(tokens, active[ordered], itl[ordered])
        beyond = tokens > active[ordered[-1]]
        if j and beyond.any():
            shorter = monotone(grid[:, j - 1])
            last = int(np.flatnonzero(~beyond)[-1])
            grid[beyond, j] += shorter[beyond] - shorter[last]
    return tokens, contexts, grid


def _array(arrays: Mapping[str, Floats], name: str, ndim: int) -> Floats:
    if name not in arrays:
        raise ConfigError(f"{name}: missing; there is {', '.join(sorted(arrays)) or 'nothing'}")
    array = arrays[name]
    if array.dtype.kind not in "fiu" or array.ndim != ndim or not array.size:
        shape = f"{array.dtype} {list(array.shape)}"
        raise ConfigError(f"{name}: {shape}, must be numbers over {ndim} axes")
    wrong = np.argwhere(~(np.isfinite(array) & (array >= 0)))
    if len(wrong):
        at = tuple(wrong[0].tolist())
        index = "".join(f"[{i}]" for i in at)
        raise ConfigError(f"{name}{index}={array[at]}: must be finite, 0 or more")
    return array.astype(np.float64)


def _capacity(arrays: Mapping[str, Floats]) -> int:
    if "max_kv_tokens" not in arrays:
        raise ConfigError("max_kv_tokens: missing; x_kv_usage is a share of it")
    value = np.asarray(arrays["max_kv_tokens"]).ravel()
    if len(value) != 1 or value.dtype.kind not in "fiu" or not 1 <= value[0] < 2**53:
        raise ConfigError(f"max_kv_tokens={value.tolist()}: must be one number of 1 or more")
    return int(value[0])
