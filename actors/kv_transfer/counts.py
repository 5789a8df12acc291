"""KV transfers of one process in one direction, for metrics: counted from many threads."""

from threading import Lock

from msgspec.structs import replace

from mallee.protocol.events import LoanUse


class Counts:
    """Counts transfers, their bytes, and the seconds in which those crossed. `use`: so far."""

    __slots__ = ("_lock", "use")

    def __init__(self) -> None:
        self._lock = Lock()
        self.use = LoanUse(0, 0, 0, 0, 0, 0.0)

    def add(self, **more: float) -> None:
        """Add to the fields of `use`."""
        with self._lock:
            sums = {name: getattr(self.use, name) + value for name, value in more.items()}
            self.use = replace(self.use, **sums)
