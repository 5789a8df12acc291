"""Rows of the array of loads [NUM_LOADS, num_workers] that slots keep and prices read; a table of prompts."""

from typing import Final

LOAD_ROWS: Final = 0  # booked rows of the batch
LOAD_BLOCKS: Final = 1  # booked active blocks, shared ones once
LOAD_PREFILL: Final = 2  # booked prompt tokens without a first token yet
LOAD_PREFILL_ENDS: Final = 3  # when they are predicted to be computed, on the router's clock
LOAD_EXTRA_ROWS: Final = 4  # reported beyond what is booked
LOAD_EXTRA_BLOCKS: Final = 5
LOAD_EXTRA_PREFILL: Final = 6
LOAD_ROOM: Final = 7  # KV blocks of the worker; 0: no request may go there
LOAD_MAX_ROWS: Final = 8  # rows beyond which it is busy; 0: no limit known
LOAD_WARM_AT: Final = 9  # until then the worker is new
LOAD_CHOSEN: Final = 10  # number of the last decision that chose it
LOAD_TOKEN_S: Final = 11  # seconds that it measured; 0: none, the cost model's count
LOAD_HOST_FIRST_S: Final = 12
LOAD_HOST_BLOCK_S: Final = 13
LOAD_DISK_FIRST_S: Final = 14
LOAD_DISK_BLOCK_S: Final = 15
LOAD_PEER_FIRST_S: Final = 16
LOAD_PEER_BLOCK_S: Final = 17
LOAD_LENDS: Final = 18  # 1: it lends its KV to the others that do, and borrows theirs
LOAD_FREE: Final = 19  # KV blocks with nothing in them, as far as events say
LOAD_GROWTH: Final = 20  # blocks that texts there are expected to bring yet
LOAD_FREED_ROWS: Final = 21  # of bookings that ended since the last report
LOAD_FREED_BLOCKS: Final = 22
LOAD_FREED_PREFILL: Final = 23
NUM_LOADS: Final = 24
LOADS_FETCH: Final = slice(LOAD_TOKEN_S, LOAD_PEER_BLOCK_S + 1)  # in the order of `FetchPrices`
LOADS_BOOKED: Final = (LOAD_ROWS, LOAD_BLOCKS, LOAD_PREFILL)
LOADS_REPORTED: Final = (LOAD_EXTRA_ROWS, LOAD_EXTRA_BLOCKS, LOAD_EXTRA_PREFILL)
LOADS_FREED: Final = (LOAD_FREED_ROWS, LOAD_FREED_BLOCKS, LOAD_FREED_PREFILL)

NUM_PROMPT_BLOCKS: Final = 1 << 16
PROMPT_WORDS: Final = 3  # of an entry
