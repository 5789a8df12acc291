"""A broker without accounts, for tests in which one client speaks for gateways and workers."""

from mallee.runtime.bus.access import BrokerAccess
from mallee.runtime.bus.broker import Broker


class OpenBroker(Broker):
    """Takes everybody, for everything."""

    def __init__(self, port: int | None = None) -> None:
        super().__init__(port, fleet="test")

    @property
    def open_access(self) -> BrokerAccess:
        return BrokerAccess(self.url)

    def _authorization(self) -> str:
        return ""
