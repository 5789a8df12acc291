"""Cost of a pass: the contract of timing models, and the costs that an engine adds."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol, runtime_checkable

from mallee.protocol.errors import ConfigError

MAX_JITTER: Final = 3.0  # with more, nearly all steps take no time and a few take all of it


class TimingModel(Protocol):
    """Seconds that a device works for one pass; the engine's own overhead is not in it.

    Monotone: more tokens never cost less. Pure: the same arguments give the same figure.
    """

    def prefill_s(self, num_new: int, prefix: int) -> float:
        """One chunk of `num_new` tokens behind `prefix` that are cached; 0 if `num_new` is 0."""
        ...

    def decode_s(self, rows: int, context: float) -> float:
        """One token for each of `rows` that read `context` tokens together; 0 if `rows` is 0.

        Where shared blocks are read once, `context` counts them once.
        """
        ...

    @property
    def base_s(self) -> float:
        """Least cost of a pass: the weights are read once. A mixed pass pays it once."""
        ...


@runtime_checkable
class WholePass(Protocol):
    """A model that knows what a mixed pass costs; for others it is the sum of its parts."""

    def pass_s(self, chunks: Sequence[tuple[int, int]], rows: int, context: float) -> float:
        """Seconds of a pass over `chunks` (new, prefix) and `rows` decodes."""
        ...


@runtime_checkable
class Summed(Protocol):
    """A model that sums decodes without a loop."""

    def decodes_s(self, rows: int, context: float, num_steps: int) -> float:
        """The sum of decode_s(rows, context + i * rows) for i below `num_steps`."""
        ...


@dataclass(frozen=True, slots=True)
class Timing:
    """Cost of an engine's steps: a model of the device and what the engine adds.

    Every step pays `overhead_s`. A request pays `request_s` once, before its engine sees it, while
    the engine does other things (network, tokenizer, queues between processes): the driver of engines
    adds it. `jitter` is the sigma of a lognormal factor of mean 1, drawn by the driver of the steps:
    nothing here is random. `speedup` divides steps and requests, not `startup_s`, the time before a
    worker takes its first command. With
    `shares_reads` blocks that rows share are read once, and the caller counts them once.
    Raises ConfigError on figures that can't be.
    """

    model: TimingModel
    overhead_s: float = 0.0
    jitter: float = 0.0
    speedup: float = 1.0
    startup_s: float = 0.0
    shares_reads: bool = False
    request_s: float = 0.0
    _pass: WholePass | None = field(init=False, repr=False, compare=False)
    _summed: Summed | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("overhead_s", "request_s", "jitter", "startup_s"):
            value = getattr(self, name)
            if not 0.0 <= value < float("inf"):
                raise ConfigError(f"{name}={value}: give 0 or more")
        if self.jitter > MAX_JITTER:
            raise ConfigError(f"jitter={self.jitter}: give a sigma of at most {MAX_JITTER:g}")
        if not 0.0 < self.speedup < float("inf"):
            raise ConfigError(f"speedup={self.speedup}: give more than 0 (1: as measured)")
        model = self.model
        object.__setattr__(self, "_pass", model if isinstance(model, WholePass) else None)
        object.__setattr__(self, "_summed", model if isinstance(model, Summed) else None)

    def step_s(self, chunks: Sequence[tuple[int, int]], rows: int, context: float) -> float:
        """Seconds of a step over `chunks` (new tokens, cached prefix) and `rows` decodes.

        `context` is what the decodes read together, in tokens. Without jitter. A step that
        computes nothing takes the overhead.
        """
        model = self.model
        if not chunks:
            return (self.overhead_s + model.decode_s(rows, context)) / self.speedup
        if self._pass is not None:
            return (self.overhead_s + self._pass.pass_s(chunks, rows, context)) / self.speedup
        parts = len(chunks) - 1 + (rows > 0)
        device = model.decode_s(rows, context) - parts * model.base_s
        for num_new, prefix in chunks:
            device += model.prefill_s(num_new, prefix)
        return (self.overhead_s + device) / self.speedup

    def multi_step_s(self, rows: int, context: float, num_steps: int) -> float:
        """Seconds of `num_steps` decode steps in a row, of which step i reads context + i * rows.

        Equals the sum of their `step_s`, but for rounding. O(1) where the model allows.
        """
        if num_steps == 1:
            return (self.overhead_s + self.model.decode_s(rows, context)) / self.speedup
        if self._summed is not None:
            device = self._summed.decodes_s(rows, context, num_steps)
        else:
            decode_s = self.model.decode_s
            device = sum(decode_s(rows, context + i * rows) for i in range(num_steps))
        return (num_steps * self.overhead_s + device) / self.speedup
