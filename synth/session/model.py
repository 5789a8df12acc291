"""The learned session model, and the workloads it generates."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Literal

import numpy as np

from mallee.protocol.errors import ConfigError
from mallee.synth.core.arrivals import Starts, Turnstile
from mallee.synth.core.jitter import Ranks
from mallee.synth.core.knobs import AS_LEARNED, Knobs
from mallee.synth.core.streams import stream
from mallee.synth.session.emit import Queue
from mallee.synth.session.forest import Forest
from mallee.synth.session.marks import Samples
from mallee.synth.session.period import Period, PeriodMaker
from mallee.synth.session.steps import Steps
from mallee.synth.session.texts import Texts
from mallee.traces.numbers import Floats
from mallee.traces.workload import Request, Workload

_STREAMS: Final = ("plan", "starts", "marks", "families", "texts", "renewal")


@dataclass(frozen=True)
class SessionModel:
    """What was learned of one source. See `fit.fit_session`.

    `cut_off` is None of a source whose sessions all ended (it begins none in its last tenth); its
    requests are then generated session by session to the end. Of any other it is for the last
    step of each line the chance that the source's end cut the line off, and what is generated is as
    long a piece of endless traffic.
    """

    name: str
    block_size: int
    rule: Literal["floor", "ceil"]
    classes: tuple[str, ...]
    steps: Steps
    forest: Forest
    starts: Starts
    turnstile: Turnstile | None
    cut_off: Floats | None
    has_ids: bool
    has_edges: bool
    has_sessions: bool

    kind = "session"

    @cached_property
    def ranks(self) -> Samples:
        """Samples that marks are drawn near to."""
        return Samples(
            Ranks(self.steps.fresh.astype(np.float64)),
            Ranks(self.steps.output.astype(np.float64)),
            Ranks(self.steps.gap_s),
        )

    def generate(self, *, requests: int, seed: int, knobs: Knobs = AS_LEARNED) -> Workload:
        """`requests` requests in order of arrival; the same for the same seed, knobs and model.

        They carry sessions, who waits for whom, and tool waits; `arrival_s` is the open loop's time.
        Raises ConfigError for a knob out of range.
        """
        turned = knobs.validate()
        if requests < 1:
            raise ConfigError(f"requests={requests}: give 1 or more")
        return Workload(
            name=f"{self.name}, generated",
            id_tokens=self.block_size,
            read=lambda: self._requests(requests, seed, turned),
            kind="agentic",
            note=f"session model of {self.name}, seed {seed}",
        )

    def _requests(self, requests: int, seed: int, knobs: Knobs) -> Iterator[Request]:
        texts = Texts(self.forest, knobs.prefix_len, stream(seed, "texts"))
        maker = PeriodMaker(self, knobs, texts)
        queue = Queue(self.classes, texts)
        made = 0
        for number in range(requests):  # each period has a request at least
            rngs = {name: stream(seed, name, number) for name in _STREAMS}
            if number:
                texts.renew(rngs["renewal"])
            most = requests - made if self.cut_off is None else None
            period: Period = maker.make(rngs, most)
            queue.add(period)
            made += len(period)
            is_last = self.cut_off is None and made >= requests
            until_s = float("inf") if is_last else maker.next_s
            yield from queue.take(requests, until_s)
            if queue.num_taken >= requests:
                return
