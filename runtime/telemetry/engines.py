"""One engine's latencies as its process sees them: counted only where a process serves metrics."""

from collections.abc import Iterable
from typing import Final

from mallee.protocol.messages import Update
from mallee.runtime.telemetry.families import BETWEEN_S, FIRST_S, MOST_WORKERS, Families, Label

ENGINE: Final = (Label("model_name", most=1), Label("engine", most=MOST_WORKERS + 1))
VLLM: Final = "Workers: vLLM's names"
ENGINES: Final = "Workers: engines and connections"


class EngineMeters:
    """The meters of all engines of a process; those of engines beyond `MOST_WORKERS` are one."""

    def __init__(self, registry: Families) -> None:
        area = registry.area(VLLM)
        self.first_s = area.histogram(
            "vllm:time_to_first_token_seconds",
            "From a request's handing over to the engine to the first token of each branch.",
            FIRST_S,
            *ENGINE,
        )
        self.gap_s = area.histogram(
            "vllm:inter_token_latency_seconds",
            "Between two tokens of a branch.",
            BETWEEN_S,
            *ENGINE,
        )
        self.step_s = registry.area(ENGINES).histogram(
            "mallee_engine_step_seconds",
            "Steps of the engine, from the plan to what was drawn.",
            BETWEEN_S,
            *ENGINE,
        )

    def meter(self, model: str, engine: str) -> "EngineMeter":
        """That of an engine, by the label that it is shown under."""
        return EngineMeter(self, model, engine)


class _Timing:
    """A request that is not over: when it came, and each branch's last token."""

    __slots__ = ("asked", "last")

    def __init__(self, asked: float) -> None:
        self.asked = asked
        self.last: dict[int, float] = {}


class EngineMeter:
    """The latencies of one engine. Belongs to an event loop, but for `stepped`."""

    def __init__(self, meters: EngineMeters, model: str, engine: str) -> None:
        self._first_s = meters.first_s.labels(model, engine)
        self._gap_s = meters.gap_s.labels(model, engine)
        self._step_s = meters.step_s.labels(model, engine)
        self._open: dict[tuple[str, str], _Timing] = {}

    def stepped(self, seconds: float) -> None:
        """Count a step. From any thread."""
        self._step_s.observe(seconds)

    def asked(self, gateway: str, request: str, now: float) -> None:
        """A request of `gateway` came, and has begun only once."""
        self._open.setdefault((gateway, request), _Timing(now))

    def took(self, gateway: str, updates: Iterable[Update], now: float) -> None:
        """Updates for `gateway` are there: several tokens of one count by their mean."""
        for update in updates:
            timing = self._open.get((gateway, update.request))
            if timing is None or not update.num_tokens:
                continue
            last = timing.last.get(update.branch)
            if last is None:
                self._first_s.observe(now - timing.asked)
            else:
                self._gap_s.observe((now - last) / update.num_tokens)
            timing.last[update.branch] = now

    def over(self, gateway: str, request: str) -> None:
        """No branch of it is open any more."""
        self._open.pop((gateway, request), None)

    def dropped(self, gateway: str | None = None) -> None:
        """Forget what is open of `gateway`, or all."""
        self._open = {
            key: timing
            for key, timing in self._open.items()
            if gateway is not None and key[0] != gateway
        }
