"""The tokens of a text that was cut: whole ones up to the cut, and the rest of the one it is inside of."""

from collections.abc import Collection, Sequence
from typing import Final, NamedTuple

from mallee.api.text.tokenizer import Tokenizer

WINDOW: Final = 64  # tokens before the end, at first, among which a cut is looked for
MAX_LONGER: Final = 4  # tokens before the cut that may be written anew with its residue


class TokenCut(NamedTuple):
    """The beginning of a text: its first `num_tokens` tokens, then `residue`."""

    num_tokens: int
    residue: list[int]


def find_cut(
    tokenizer: Tokenizer,
    tokens: Sequence[int],
    num_dropped: int,
    *,
    is_whole: bool,
    shown: Collection[str] = (),
    scope: str = "",
) -> TokenCut | None:
    """The tokens of the text of `tokens` without its last `num_dropped` characters.

    `is_whole`: no token follows, so that an unfinished character counts. `shown`: special tokens that the
    text has. None if no tokens have exactly that
    text: some tokenizers can't write every text.
    """
    window = WINDOW
    while True:
        begin = max(0, len(tokens) - window)
        cut = _in_window(
            tokenizer, tokens, begin, num_dropped, is_whole=is_whole, shown=shown, scope=scope
        )
        if cut is not None or not begin:
            return cut
        window *= 4


def _in_window(
    tokenizer: Tokenizer,
    tokens: Sequence[int],
    begin: int,
    num_dropped: int,
    *,
    is_whole: bool,
    shown: Collection[str],
    scope: str,
) -> TokenCut | None:
    """The cut, if it is behind the first token of the window: that one's text depends on those before."""
    text = tokenizer.detokenizer(shown)
    written, ends = "", []  # (tokens, characters) where all of the text was written
    if not begin:
        ends.append((0, 0))
    for number, token in enumerate(tokens[begin:], begin + 1):
        written += text.push([token])
        if not text.is_waiting:
            ends.append((number, len(written)))
    if is_whole:
        written += text.push((), is_last=True)
    seen = len(written) - num_dropped
    if seen < 0:
        return None
    exact = next((number for number, chars in ends if chars == seen), None)
    if exact is not None:
        return TokenCut(exact, [])
    before = [end for end in ends if end[1] < seen][::-1]
    for number, chars in before[:MAX_LONGER]:
        residue = written[chars:seen]
        ids = tokenizer.encode(residue, scope=scope)
        text = tokenizer.detokenizer(shown)
        text.push(tokens[begin:number])
        if ids and text.push(ids, is_last=True) == residue:
            return TokenCut(number, ids)
    return None
