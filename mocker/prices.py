"""The router's prices for a timing: it believes of the engines what they do."""

from typing import Final

from mallee.mocker.timing import Timing
from mallee.router.config import CostModel

_PROMPT: Final = 16_384
_ROWS: Final = 64
_CONTEXT: Final = 1024  # tokens that a row reads


def cost_model(timing: Timing, block_size: int) -> CostModel:
    """Prices that fit `timing`: chords through a prompt, a batch and its context.

    The router prices straight lines. A timing that bends is met at the sizes above, and prompts up to
    twice as long within a half: attention makes a token of a prompt of 64k tokens cost two to three times
    as much as one of 2k, and most prompts are nearer to those.
    """
    idle = timing.step_s([(1, 0)], 0, 0)
    one = timing.step_s((), 1, _CONTEXT)
    rows = timing.step_s((), _ROWS, _CONTEXT)
    wide = timing.step_s((), _ROWS, _ROWS * _CONTEXT)
    row_s = max(0.0, rows - one) / (_ROWS - 1)
    token_s = max(0.0, wide - rows) / ((_ROWS - 1) * _CONTEXT)
    return CostModel(
        prefill_token_s=max(0.0, timing.step_s([(_PROMPT, 0)], 0, 0) - idle) / (_PROMPT - 1),
        step_base_s=max(0.0, one - row_s - token_s * _CONTEXT),
        step_row_s=row_s,
        step_block_s=token_s * block_size,
    )
