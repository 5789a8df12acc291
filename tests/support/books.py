"""A ledger for tests of the bookings that gateways tell each other."""

import msgspec

from mallee.protocol.bookings import Booked
from mallee.protocol.ids import RequestId


class Books:
    """The remote half of a router: knows some workers, counts bookings on them."""

    def __init__(self, lives: dict[str, int]) -> None:
        self.lives = lives  # worker -> incarnation
        self.booked: dict[str, Booked] = {}

    def book_remote(self, booking: Booked) -> bool:
        if self.lives.get(booking.worker) != booking.incarnation:
            return False
        self.booked.setdefault(booking.request, booking)
        return True

    def prefill_done_remote(self, request: RequestId) -> bool:
        booking = self.booked.get(request)
        if booking is None:
            return False
        self.booked[request] = msgspec.structs.replace(booking, prefill_tokens=0)
        return True

    def free_remote(self, request: RequestId) -> bool:
        return self.booked.pop(request, None) is not None

    def forget(self, worker: str) -> None:
        self.lives.pop(worker, None)
        self.booked = {r: b for r, b in self.booked.items() if b.worker != worker}
