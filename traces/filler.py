"""Text for blocks and lengths: about a token a word, equal for equal ids, in any process."""

from typing import Final

import numpy as np
import numpy.typing as npt

# Common words that most vocabularies have, with the space before them, as one token.
_COMMON: Final = (
    "the of and to in a is that for it as was with be by on not he his but at are this have from or had"
    " an they which one you were all her she there would their we him been has when who will no more if"
    " out so up said what its about than into them can only other time new some could these two may first"
    " then do any like my now over such our man me even most made after also did many off before must well"
    " back through years much where your way down should because long each just state those people too"
    " how little good world make very year still see own work men day get here old life both between"
    " being under three never know same last another while us might great go come since against right came"
    " take used himself few house use place during high without again home around small however found part"
    " school every once general upon war say got number until always away public something fact though"
    " water less put think almost hand enough far took head yet government system set better nothing night"
    " end why called find going look asked later point knew next city business case group toward young days"
    " let room within give side social several present order national second possible rather per face among"
    " form often early white large"
)
WORDS: Final = tuple(dict.fromkeys(_COMMON.split()))

_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)
_MIX: Final = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_words: Final = np.array(WORDS, dtype=object)
_NUM_WORDS: Final = np.uint64(len(WORDS))


def words(keys: npt.NDArray[np.uint64], each: int, count: int) -> str:
    """`count` words, `each` of them for every key in turn; equal key, equal words."""
    begin = _mixed((keys + np.uint64(1)) * _GOLDEN)[:, None]
    places = _mixed(begin + np.arange(1, each + 1, dtype=np.uint64) * _GOLDEN) % _NUM_WORDS
    return " ".join(_words[places.ravel()[:count].astype(np.int64)].tolist())


def _mixed(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Numbers that look random (`splitmix64`)."""
    state = (state ^ (state >> np.uint64(30))) * _MIX[0]
    state = (state ^ (state >> np.uint64(27))) * _MIX[1]
    return state ^ (state >> np.uint64(31))
