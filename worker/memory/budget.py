"""The split of a device's memory: every need beside KV is a line of one sum, and KV gets the rest.

The lines add up to the whole device, so nothing is counted twice. A device that shares the host's memory has
no host tier: what settings give to one is KV, where a block is found again without being copied. Lines that
nobody can know ahead (graphs, the attention's workspace) are round figures, generous on purpose.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from mallee.protocol.errors import ConfigError

GIB: Final = 1 << 30
MIB: Final = 1 << 20

DISCRETE_SHARE: Final = 0.9
UNIFIED_SHARE: Final = 0.8
"""Of memory that is the host's too: its system, Ray, the gateway and the page cache live there."""
GRAPHS: Final = 512 * MIB
"""Recorded decode steps and their buffers, which are measured at the start: what is more is left out."""
WORKSPACE: Final = 512 * MIB
"""The attention's own, and what matrix products take for a moment."""
LEAST_LEFT: Final = 0.02
"""Share of a device that stays free where others use it too."""


class DeviceMemory(NamedTuple):
    """Bytes of a device. `is_unified`: they are the host's, and `free` is what the host has available."""

    name: str
    total: int
    free: int
    is_unified: bool = False


class Work(NamedTuple):
    """Sizes of a model and of a worker's largest step, in bytes and numbers."""

    weights: int
    token_nbytes: int  # of activations that a token of a step has at once
    row_nbytes: int  # of logits
    block_nbytes: int  # of KV
    max_rows: int
    max_step_tokens: int
    kept_rows: int = 0  # of logits that capsules keep
    staged_blocks: int = 0  # that are on their way to or from a tier
    draw_nbytes: int = 0  # beside a step's logits while tokens are drawn from them


@dataclass(frozen=True, slots=True)
class Budget:
    """The split of `device`, which was looked at before anything was loaded. The lines sum to its total."""

    device: DeviceMemory
    share: float
    weights: int
    graphs: int
    activations: int
    logits: int
    staging: int
    others: int  # in use before
    reserve: int
    kv: int  # less than 0: there is no room
    draft: int = 0  # of a draft model: weights, and its KV once that is known

    def with_draft_kv(self, nbytes: int) -> "Budget":
        """The same, with so many bytes of KV for the draft model."""
        return replace(self, kv=self.kv - nbytes, draft=self.draft + nbytes)

    def lines(self) -> Iterator[tuple[str, int]]:
        """Every part by name, the largest consumers of a plan first and KV last."""
        yield "weights", self.weights
        yield "draft model", self.draft
        yield "CUDA graphs", self.graphs
        yield "activations", self.activations
        yield "logits", self.logits
        yield "staging", self.staging
        yield "in use before", self.others
        yield "reserve", self.reserve
        yield "KV", self.kv

    def __str__(self) -> str:
        kind = "unified memory" if self.device.is_unified else "memory"
        parts = ", ".join(f"{name} {_gib(nbytes)}" for name, nbytes in self.lines() if nbytes)
        whole = f"{_gib(self.device.total)} of {kind} of {self.device.name}"
        return f"{whole}, of which {self.share:g} may be used: {parts}"


@dataclass(frozen=True, slots=True)
class Room:
    """A worker's part of a device that `probe` looks at, by torch's name of it.

    `share` of all its memory, by default 0.9, and 0.8 where it is the host's too; times `part` if workers
    share the device. `host_tier` bytes are the worker's tier of host memory, where that is another.
    """

    probe: Callable[[str], DeviceMemory]
    share: float | None = None
    part: float = 1.0
    max_rows: int = 256
    max_step_tokens: int = 512
    kept_rows: int = 0
    host_tier: int = 0
    graphs: int = GRAPHS  # bytes for recorded steps; 0: none are recorded

    def split(self, device: DeviceMemory, work: Work, draft: Work | None = None) -> Budget:
        """The budget on `device`. Raises ConfigError if there is no room for a block of KV.

        A `draft` model computes between the steps of the other, in the same memory: what is more of its step
        counts, and its KV is a part of all KV.
        """
        default = UNIFIED_SHARE if device.is_unified else DISCRETE_SHARE
        share = default * min(1.0, self.part) if self.share is None else self.share
        others = max(0, device.total - device.free)
        usable = min(int(share * device.total), device.free - int(LEAST_LEFT * device.total))
        models = (work,) if draft is None else (work, draft)
        row_nbytes = max(each.row_nbytes for each in models)
        block_nbytes = sum(each.block_nbytes for each in models)
        # Of a step, and of the next one, which may be launched before the step is over.
        num_rows = 2 * work.max_rows
        logits = num_rows * row_nbytes + work.kept_rows * work.row_nbytes + work.draw_nbytes
        activations = work.max_step_tokens * max(each.token_nbytes for each in models) + WORKSPACE
        staging = work.staged_blocks * work.block_nbytes
        weights = sum(each.weights for each in models)
        needs = weights + self.graphs + activations + logits + staging
        budget = Budget(
            device,
            share,
            weights=work.weights,
            graphs=self.graphs,
            activations=activations,
            logits=logits,
            staging=staging,
            others=others,
            reserve=device.free - usable,
            kv=usable - needs,
            draft=0 if draft is None else draft.weights,
        )
        if budget.kv < block_nbytes:
            raise _no_room(f"a block of KV, {block_nbytes} bytes", budget)
        return budget

    def given(self, device: DeviceMemory, kv: int) -> int:
        """The bytes of KV where settings want `kv`: with those of a host tier in the same memory.

        Raises ConfigError if they are more than is free now.
        """
        tier = self.host_tier if device.is_unified else 0
        if kv + tier > device.free:
            beside = f", with {_gib(tier)} of engine.host_gib in the same memory," if tier else ""
            raise ConfigError(
                f"KV of {_gib(kv)} (engine.kv_gib or engine.kv_tokens){beside} can't be had:"
                f" {device.name} has {_gib(device.free)} of {_gib(device.total)} free beside the weights;"
                " lower it, or leave it out and it is sized by what is free"
            )
        return kv + tier


def check_context(budget: Budget, max_model_len: int, nbytes: int) -> None:
    """Raises ConfigError if a sequence of `max_model_len` tokens, of `nbytes` of KV, doesn't fit."""
    if nbytes > budget.kv:
        what = f"a sequence of engine.max_model_len={max_model_len}, {_gib(nbytes)} of KV"
        raise _no_room(what, budget)


def out_of_memory(doing: str, budget: Budget | None) -> ConfigError:
    """The error of an allocation that a device refused at the start."""
    told = "" if budget is None else f" ({budget})"
    return ConfigError(f"the device ran out of memory while {doing}{told}; {_REMEDIES}")


_REMEDIES: Final = (
    "lower engine.max_model_len, scheduler.max_rows or scheduler.max_step_tokens, keep KV in half the bytes"
    " (engine.kv_dtype: fp8), take a smaller model or a quantised one, free what others hold on the device,"
    " or change engine.device_share"
)


def _no_room(what: str, budget: Budget) -> ConfigError:
    smaller = ", or take a smaller draft model (engine.draft_model)" if budget.draft else ""
    return ConfigError(f"no room for {what}: {budget}; {_REMEDIES}{smaller}")


def _gib(nbytes: int) -> str:
    return f"{nbytes / GIB:.2f} GiB"
