"""The router's prices for a timing: what it believes of the engines is what they do."""

from mallee.mocker.timing import Timing
from mallee.router.config import CostModel

_CHUNK = (
    65_536  # tokens of a prompt: a wrong price of a long one costs seconds, of a short one little
)
_ROWS = 64
_CONTEXT = 1024  # tokens that a row reads


def cost_model(timing: Timing, block_size: int) -> CostModel:
    """Prices that fit `timing`: chords through a prompt, a batch and its context.

    The router prices straight lines; a timing that bends is met at the sizes above.
    """
    idle = timing.step_s([(1, 0)], 0, 0)
    one = timing.step_s((), 1, _CONTEXT)
    rows = timing.step_s((), _ROWS, _CONTEXT)
    wide = timing.step_s((), _ROWS, _ROWS * _CONTEXT)
    row_s = max(0.0, rows - one) / (_ROWS - 1)
    token_s = max(0.0, wide - rows) / ((_ROWS - 1) * _CONTEXT)
    return CostModel(
        prefill_token_s=max(0.0, timing.step_s([(_CHUNK, 0)], 0, 0) - idle) / (_CHUNK - 1),
        step_base_s=max(0.0, one - row_s - token_s * _CONTEXT),
        step_row_s=row_s,
        step_block_s=token_s * block_size,
    )
