"""Drafts from texts that are there already: what came before the same few tokens, and what followed.

A draw is a function of its logits, seed and position, so a draft is verified by drawing: it is right as far
as the draws repeat it. What a drafter says changes how many tokens a step yields, and nothing else.

The prompt is indexed once, in sorted arrays (0.5 ms for 8192 tokens, shared by the forks of a capsule); what
is drawn after it token by token. Rejected: a suffix automaton, which finds the longest match (in
Python 5 MB for a prompt of 8192 tokens, for each branch).
"""

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Final, Protocol, TypeAlias
from weakref import ref

import numpy as np
import numpy.typing as npt
import xxhash

from mallee.protocol.messages import Fork, Generate
from mallee.worker.kv.node import Node
from mallee.worker.kv.paths import path_texts
from mallee.worker.sched.branch import Branch

NUM_MATCHED: Final = 3
"""A draft is what followed the last so many tokens, where they were last seen."""
MAX_INDEXED: Final = 8192
"""Tokens of one prompt that are indexed, the last ones; and of drawn texts, at least half as many."""
MAX_SHARED: Final = 32
"""Prompts of capsules that are kept indexed for further forks."""
MAX_FAMILIES: Final = 64
"""Prompts and capsules whose branches draft for one another, those used last."""

_BITS: Final = 21  # of a token id in a key; larger ids make drafts worse, no answer wrong
_MASK: Final = (1 << 64) - 1


class Drafter(Protocol):
    """Guesses next tokens. Called from one thread; bounded memory."""

    def read(self, branch: Branch) -> None:
        """Take in what `branch` drew since the last time."""
        ...

    def propose_all(self, lengths: Mapping[Branch, int]) -> Mapping[Branch, Sequence[int]]:
        """At most so many tokens that may follow the text of each branch; none of one without a guess.

        Raises DeviceMemoryExhausted: it has forgotten nothing, and may be asked again.
        """
        ...

    def seconds(self, branch: Branch, num_branches: int) -> float:
        """Time that each token of a draft of `branch` takes beside so many others'; 0 if hardly any."""
        ...

    def forget(self, branch: Branch) -> None:
        """`branch` is over. It may be unknown."""
        ...


def _key(context: Sequence[int]) -> int:
    a, b, c = context
    return ((a << 2 * _BITS) ^ (b << _BITS) ^ c) & _MASK


def text_of(branch: Branch, begin: int, end: int) -> list[int]:
    """Tokens `begin` to `end` of the whole text of `branch`, which is not over. O(their number)."""
    own, tokens = branch.origin_len, branch.tokens
    if begin >= own:
        return list(tokens[begin - own : end - own])
    assert branch.origin is not None, "a text without a beginning"
    above = path_texts(branch.origin, begin, min(end, own))
    return [*(token for part in above for token in part), *tokens[: max(0, end - own)]]


class IndexedText:
    """A text that grows no more: the last place after any `NUM_MATCHED` tokens of it."""

    __slots__ = ("_keys", "_places", "_text")

    def __init__(self, tokens: Sequence[int]) -> None:
        text = np.array(tokens, dtype=np.uint64)
        bits = np.uint64(_BITS)
        keys = (text[:-3] << bits + bits) ^ (text[1:-2] << bits) ^ text[2:-1]
        order = np.argsort(keys, kind="stable")
        self._keys: npt.NDArray[np.uint64] = keys[order]
        self._places = order + NUM_MATCHED
        self._text = text

    def after(self, key: int, num_tokens: int) -> list[int]:
        """At most so many tokens that followed the last tokens of that key."""
        at = int(np.searchsorted(self._keys, np.uint64(key), side="right")) - 1
        if at < 0 or int(self._keys[at]) != key:
            return []
        place = int(self._places[at])
        found: list[int] = self._text[place : place + num_tokens].tolist()
        return found


Drawn: TypeAlias = list[int]
"""Tokens that a branch drew, behind `NUM_MATCHED` tokens of its prompt, or of what it drew before."""


class GrowingIndex:
    """Texts that grow: the last place after any `NUM_MATCHED` tokens of any of them.

    Of the last `limit` places, and of up to as many before them.
    """

    __slots__ = ("_before", "_limit", "_places")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._places: dict[int, tuple[Drawn, int]] = {}
        self._before: dict[int, tuple[Drawn, int]] = {}

    def add(self, text: Drawn, token: int) -> None:
        """`token` is the next of `text`."""
        if len(text) >= NUM_MATCHED:
            if len(self._places) >= self._limit:
                self._before, self._places = self._places, {}
            self._places[_key(text[-NUM_MATCHED:])] = (text, len(text))
        text.append(token)

    def after(self, key: int, num_tokens: int, own: Drawn) -> list[int]:
        """At most so many tokens that followed those of that key; a text that repeats itself goes on so."""
        found = self._places.get(key) or self._before.get(key)
        if found is None:
            return []
        text, place = found
        draft = text[place : place + num_tokens]
        if text is own:
            period = len(text) - place
            while len(draft) < num_tokens:
                draft.append(draft[len(draft) - period])
        return draft

    def __len__(self) -> int:
        return len(self._places) + len(self._before)


class _Reader:
    """A branch's drawn text in an index, read up to position `end`."""

    __slots__ = ("end", "index", "text")

    def __init__(self, branch: Branch, index: GrowingIndex) -> None:
        self.end = branch.prompt_len
        self.index = index
        self.text: Drawn = text_of(branch, max(0, self.end - NUM_MATCHED), self.end)

    def read(self, branch: Branch) -> None:
        """O(tokens drawn since the last time)."""
        if self.end == branch.length:
            return
        add = self.index.add
        for token in branch.tokens[self.end - branch.origin_len :]:
            if len(self.text) >= MAX_INDEXED:
                self.text = self.text[-NUM_MATCHED:]
            add(self.text, token)
        self.end = branch.length

    def draft(self, num_tokens: int) -> list[int]:
        """Of the index alone."""
        if len(self.text) < NUM_MATCHED:
            return []
        return self.index.after(_key(self.text[-NUM_MATCHED:]), num_tokens, self.text)


class Lookup(ABC):
    """A drafter that looks up what followed the last tokens of a branch, in hardly any time."""

    def __init__(self) -> None:
        self._drawn: dict[Branch, _Reader] = {}

    @abstractmethod
    def _index(self, branch: Branch) -> GrowingIndex:
        """The index that what `branch` draws is added to."""

    def read(self, branch: Branch) -> None:
        reader = self._drawn.get(branch)
        if reader is None:
            reader = self._drawn[branch] = _Reader(branch, self._index(branch))
        reader.read(branch)

    def propose(self, branch: Branch, num_tokens: int) -> Sequence[int]:
        """At most so many tokens that may follow the text of `branch`; none without a guess."""
        self.read(branch)
        return self._drawn[branch].draft(num_tokens)

    def propose_all(self, lengths: Mapping[Branch, int]) -> Mapping[Branch, Sequence[int]]:
        return {branch: self.propose(branch, num) for branch, num in lengths.items()}

    def seconds(self, branch: Branch, num_branches: int) -> float:
        return 0.0

    def forget(self, branch: Branch) -> None:
        self._drawn.pop(branch, None)


class PromptLookup(Lookup):
    """Drafts of a branch from its own text: what it drew, then its prompt.

    Source: Saxena, "Prompt Lookup Decoding", 2023.
    """

    def __init__(self) -> None:
        super().__init__()
        self._prompts: dict[Branch, list[IndexedText]] = {}  # of those that drafted
        self._shared: OrderedDict[tuple[ref[Node], int], IndexedText] = OrderedDict()

    def _index(self, branch: Branch) -> GrowingIndex:
        return GrowingIndex(MAX_INDEXED // 2)

    def propose(self, branch: Branch, num_tokens: int) -> Sequence[int]:
        draft, reader = super().propose(branch, num_tokens), self._drawn[branch]
        if draft or len(reader.text) < NUM_MATCHED:
            return draft
        prompts = self._prompts.get(branch)
        if prompts is None:
            prompts = self._prompts[branch] = self._indexed(branch)
        key = _key(reader.text[-NUM_MATCHED:])
        return next((found for text in prompts if (found := text.after(key, num_tokens))), [])

    def forget(self, branch: Branch) -> None:
        super().forget(branch)
        self._prompts.pop(branch, None)

    def _indexed(self, branch: Branch) -> list[IndexedText]:
        """The prompt of `branch`: its own part, and that before its origin, which forks share."""
        texts = []
        origin, begin, end = branch.origin, branch.origin_len, branch.prompt_len
        if end > begin:
            begin = max(0, begin - NUM_MATCHED, end - MAX_INDEXED)
            texts.append(IndexedText(text_of(branch, begin, end)))
        if origin is not None and branch.origin_len:
            key = (ref(origin), branch.origin_len)
            shared = self._shared.get(key)
            if shared is None:
                for dead in [each for each in self._shared if each[0]() is None]:
                    del self._shared[dead]
                begin = max(0, branch.origin_len - MAX_INDEXED)
                shared = IndexedText(text_of(branch, begin, branch.origin_len))
                self._shared[key] = shared
                if len(self._shared) > MAX_SHARED:
                    self._shared.popitem(last=False)
            self._shared.move_to_end(key)
            texts.append(shared)
        return texts


class SiblingLookup(Lookup):
    """Drafts of a branch from what its sisters drew: the branches of one prompt, or of one capsule.

    Also of those that are over, and of other requests: a search that comes back to a capsule finds there
    what was drawn from it before. Families are of one salt: tenants draft nothing for each other.
    """

    def __init__(self) -> None:
        super().__init__()
        self._families: OrderedDict[tuple[str, str | int], GrowingIndex] = OrderedDict()

    def _index(self, branch: Branch) -> GrowingIndex:
        command = branch.job.command
        assert isinstance(command, Fork | Generate), "it draws nothing"
        text = (
            command.capsule
            if isinstance(command, Fork)
            else xxhash.xxh3_64_intdigest(command.tokens)
        )
        key = (branch.job.salt, text)
        family = self._families.get(key)
        if family is None:
            family = self._families[key] = GrowingIndex(MAX_INDEXED // 4)
            if len(self._families) > MAX_FAMILIES:
                self._families.popitem(last=False)
        self._families.move_to_end(key)
        return family
