"""X25: what a prompt continues or shares, by a table, against the prompts themselves."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mallee.protocol.hashing import block_hashes
from mallee.router.load.kernels import note_blocks
from mallee.router.load.prompts import STEP_TOKENS, EarlierPrompts, Seen

BLOCK = 128
STEP = STEP_TOKENS // BLOCK


def seen_by_hand(earlier: list[tuple[int, ...]], prompt: tuple[int, ...]) -> Seen:
    """By the texts of all prompts so far, at every `STEP`-th block."""
    shared = uses = 0
    continues = False
    for end in range(STEP, len(prompt) + 1, STEP):
        having = [each for each in earlier if each[:end] == prompt[:end]]
        if not having:
            break
        nexts = {each[: end + STEP] for each in having if len(each) >= end + STEP}
        if len(prompt) >= end + STEP and nexts:
            nexts.add(prompt[: end + STEP])
        continues = not any(len(each) >= end + STEP for each in having)
        if len(nexts) > 1:
            shared, uses = end, len(having)
    return Seen(shared, uses, continues)


texts = st.lists(st.integers(1, 2), max_size=9).map(tuple)


@given(st.lists(texts, max_size=12))
def test_what_is_seen_of_a_prompt_follows_from_those_before(prompts: list[tuple[int, ...]]) -> None:
    table = EarlierPrompts(BLOCK)
    for i, prompt in enumerate(prompts):
        tokens = np.repeat(np.array(prompt, np.uint32), BLOCK)
        note_blocks(table.address, block_hashes(tokens, block_size=BLOCK))
        assert table.seen(len(prompt)) == seen_by_hand(prompts[:i], prompt)
