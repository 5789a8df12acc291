"""Goals of the service, which panels draw as limits and alerts hold it to."""

from typing import Final

# Share of clients' requests that are answered without a server's error, over 30 days.
ANSWERED: Final = 0.999
SERVED: Final = 'endpoint=~"/v1/.*",endpoint!~"/v1/router/.*"'

# Share of first tokens that come in so many seconds, over 30 days; a bucket of the histogram.
FIRST_TOKEN_S: Final = 2.0
FIRST_TOKEN_SHARE: Final = 0.95

NEXT_TOKEN_S: Final = 0.5  # of the slowest hundredth
LAG_S: Final = 1.0  # of events, of the slowest hundredth
STALL_S: Final = 5.0  # of branches that go on elsewhere, of the slowest twentieth
WAITING: Final = 50  # requests, of one gateway
REGRET: Final = 0.3  # share of the blocks that could have been found
KEPT: Final = 0.85  # of the room of capsules on a device
FULL: Final = 0.9  # of that in host memory, or on disk
IN_USE: Final = 0.8  # of all blocks: below that capsules share, and take less than it seems
SKEW: Final = 0.25  # of the rows that run
