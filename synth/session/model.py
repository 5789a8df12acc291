"""The session model, which generates workloads like its learned source."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from mallee.protocol.errors import ConfigError
from mallee.synth.core.knobs import AS_LEARNED, Knobs
from mallee.synth.core.streams import stream
from mallee.synth.session.emit import Queue
from mallee.synth.session.learned import Learned
from mallee.synth.session.period import PeriodMaker
from mallee.synth.session.texts import Texts
from mallee.traces.workload import Request, Workload

_STREAMS: Final = ("plan", "starts", "marks", "families", "texts", "renewal")


@dataclass(frozen=True)
class SessionModel(Learned):
    """A `Model` of sessions."""

    kind = "session"

    def generate(self, *, requests: int, seed: int, knobs: Knobs = AS_LEARNED) -> Workload:
        """`requests` requests in order of arrival; the same for the same seed, knobs and model.

        They carry sessions, waits and tool waits; `arrival_s` is the open loop's time.
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
            period = maker.make(rngs, most)
            queue.add(period)
            made += len(period)
            is_last = self.cut_off is None and made >= requests
            until_s = float("inf") if is_last else maker.next_s
            yield from queue.take(requests, until_s)
            if queue.num_taken >= requests:
                return
