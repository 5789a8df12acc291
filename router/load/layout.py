"""Rows of the array of loads [NUM_LOADS, num_workers] that slots keep and prices read."""

from typing import Final

ROWS: Final = 0  # booked rows of the batch
BLOCKS: Final = 1  # booked active blocks, shared ones once
PREFILL: Final = 2  # booked prompt tokens without a first token yet
PREFILL_ENDS: Final = 3  # when they are predicted to be computed, on the router's clock
EXTRA_ROWS: Final = 4  # reported beyond what is booked
EXTRA_BLOCKS: Final = 5
EXTRA_PREFILL: Final = 6
ROOM: Final = 7  # KV blocks of the worker; 0: no request may go there
MAX_ROWS: Final = 8  # rows beyond which it is busy; 0: no limit known
WARM_AT: Final = 9  # until then the worker is new
CHOSEN: Final = 10  # number of the last decision that chose it
NUM_LOADS: Final = 11
BOOKED: Final = (ROWS, BLOCKS, PREFILL)
REPORTED: Final = (EXTRA_ROWS, EXTRA_BLOCKS, EXTRA_PREFILL)
