"""The metrics of a picker beside those of every front."""

from mallee.actors.front.counts import FrontCounts


class PickerCounts(FrontCounts):
    """The metrics of one picker."""

    def __init__(self) -> None:
        super().__init__("picker", "Pickers")
        self._elsewhere = self.area.counter(
            "mallee_picker_served_elsewhere_total",
            "Requests that another endpoint served than the first one given.",
        )
        self._failed = self.area.counter(
            "mallee_picker_failed_streams_total",
            "Streams ended by a fault, and left to the proxy's failure mode.",
        )

    def served_elsewhere(self) -> None:
        self._elsewhere.inc()

    def failed(self) -> None:
        self._failed.inc()
