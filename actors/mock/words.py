"""The words of mocked answers: whole words of the served tokenizer, common ones more often."""

import re

from mallee.api.text.tokenizer import Tokenizer

NUM_WORDS = 2000
_WORD = re.compile(rb" [a-z]{2,}|\.|,")


def words_of(tokenizer: Tokenizer) -> list[int]:
    """Token ids to draw from, evenly: text of these reads like words. Empty: it has no such tokens.

    Low ids were merged first, so they are the common ones: the n-th word is there about 1 / n as often
    as the first, as in real text.
    """
    ends = set(tokenizer.eos_token_ids)
    found: list[int] = []
    for token in range(tokenizer.vocab_size):
        if token not in ends and _WORD.fullmatch(tokenizer.token_bytes(token)):
            found.append(token)
            if len(found) == NUM_WORDS:
                break
    return [
        token for rank, token in enumerate(found, 1) for _ in range(1 + NUM_WORDS // (8 * rank))
    ]
