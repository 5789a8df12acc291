"""Rates, queues and times of a service over the last looks, as rows of text."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import Final, NamedTuple, TypeAlias

from rich.text import Text

from mallee.cli.remote.fleet import Sample

NUM_LOOKS: Final = 60
MAX_GATEWAYS: Final = 64
COLUMNS: Final = ("figure", "now", "most", "the last looks")
_STEPS: Final = "▁▂▃▄▅▆▇█"

Reading: TypeAlias = Callable[[Sample, Sample | None], float | None]


class Figure(NamedTuple):
    """Something that is drawn over time. `read`: from a look and the one before; None: not known."""

    name: str
    read: Reading
    digits: int = 0


def _gauge(metric: str) -> Reading:
    return lambda now, before: now.metrics.total(metric)


def _use(count: str) -> Reading:
    """Of all workers."""
    return lambda now, before: now.use(attrgetter(count))


def _use_rate(count: str) -> Reading:
    return lambda now, before: now.growth(lambda look: look.use(attrgetter(count)), before)


def _rate(metric: str) -> Reading:
    return lambda now, before: now.rate(metric, before)


def _mean_ms(histogram: str) -> Reading:
    """Of what ended between the two looks."""

    def read(now: Sample, before: Sample | None) -> float | None:
        seconds, num = (now.rate(f"{histogram}_{part}", before) for part in ("sum", "count"))
        return 1000 * seconds / num if seconds is not None and num else None

    return read


def _found(now: Sample, before: Sample | None) -> float | None:
    """The share of prompt tokens whose KV was there."""
    found, computed = (
        now.rate(f"mallee_{kind}_tokens_total", before) for kind in ("cached", "prefill")
    )
    if found is None or computed is None or not found + computed:
        return None
    return 100 * found / (found + computed)


FIGURES: Final = (
    Figure("requests waiting", _gauge("mallee_requests_waiting")),
    Figure("branches in flight", _gauge("mallee_branches_in_flight")),
    Figure("branches running on workers", _use("running_branches")),
    Figure("branches waiting in workers", _use("waiting_branches")),
    Figure("answers/s", _rate("mallee_http_answers_total"), 1),
    Figure("forked branches/s", _rate("mallee_forked_branches_total"), 1),
    Figure("output tokens/s", _rate("mallee_output_tokens_total")),
    Figure("prompt tokens/s", _rate("mallee_prompt_tokens_total")),
    Figure("prompt tokens found, %", _found),
    Figure("first token, ms", _mean_ms("mallee_time_to_first_token_seconds"), 1),
    Figure("between tokens, ms", _mean_ms("mallee_inter_token_latency_seconds"), 1),
    Figure("refused/s", _rate("mallee_admission_refusals_total"), 1),
    Figure("moved to other workers/s", _rate("mallee_branches_moved_total"), 1),
    Figure("preempted/s", _use_rate("preemptions"), 1),
    Figure("evicted blocks/s", _use_rate("evicted_blocks")),
)


class History:
    """The last NUM_LOOKS readings of every figure. Rates are of two looks at the same gateway."""

    def __init__(self) -> None:
        self._readings = [deque[float | None](maxlen=NUM_LOOKS) for _ in FIGURES]
        self._before: dict[str, Sample] = {}

    def add(self, sample: Sample) -> Sample | None:
        """Returns the look before at that gateway."""
        gateway = sample.metrics.gateway
        before = self._before.pop(gateway, None)
        if len(self._before) == MAX_GATEWAYS:
            del self._before[next(iter(self._before))]
        self._before[gateway] = sample
        for figure, readings in zip(FIGURES, self._readings, strict=True):
            readings.append(figure.read(sample, before))
        return before

    def rows(self) -> Iterator[tuple[str, tuple[Text, ...]]]:
        """A key and the cells, of COLUMNS."""
        for figure, readings in zip(FIGURES, self._readings, strict=True):
            known = [value for value in readings if value is not None]
            now = readings[-1] if readings else None
            yield (
                figure.name,
                (
                    Text(figure.name),
                    *(_number(value, figure.digits) for value in (now, max(known, default=None))),
                    Text(spark(list(readings)), style="green"),
                ),
            )


def _number(value: float | None, digits: int) -> Text:
    return Text("-" if value is None else f"{value:,.{digits}f}")


def spark(values: Sequence[float | None]) -> str:
    """A column for each value, as high as its share of the highest; a blank for one that is not known."""
    most = max((value for value in values if value is not None), default=0.0)
    last = len(_STEPS) - 1
    return "".join(
        " " if value is None else _STEPS[round(last * value / most) if most > 0 else 0]
        for value in values
    )
