"""The engine's view of texts: they can be cut, joined, read from commands and hashed.

Texts are lists of token ids, unless the forward pass never looks at a token: then they may be written
in less (`mocker.run_length`). Tree, scheduler and engine treat both alike.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol, overload

from mallee.protocol.errors import InvalidParameter
from mallee.protocol.hashing import Hashes, block_hashes
from mallee.protocol.messages import pack_tokens, unpack_tokens


class Text(Protocol):
    """A list of tokens, or what behaves like one."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[int]: ...

    @overload
    def __getitem__(self, key: int, /) -> int: ...

    @overload
    def __getitem__(self, key: slice, /) -> "Text": ...

    def __delitem__(self, key: slice, /) -> None: ...

    def append(self, token: int, /) -> None: ...

    def extend(self, tokens: "Iterable[int]", /) -> None: ...


class Notation(Protocol):
    """A way to write texts. One engine has one; all its texts are of its kind."""

    def empty(self) -> Text:
        """A new text without tokens."""
        ...

    def read(self, raw: bytes) -> Text:
        """The text of a command's field. Raises InvalidParameter, CodecError."""
        ...

    def dump(self, text: Text) -> bytes:
        """Four bytes a token, the same of equal texts: in records of capsules, to be compared."""
        ...

    def compact(self, text: Text) -> Text:
        """`text`, to be kept for long in little memory: only to be cut, joined and iterated."""
        ...

    def hashes(
        self, text: Text, block_size: int, *, salt: str, parent: int | None = None
    ) -> Hashes:
        """Chain hashes of the full blocks of `text`, which follows the block `parent` (None: nothing)."""
        ...


class TokenNotation:
    """Texts are lists of token ids below `vocab_size`; hashed as every gateway does."""

    def __init__(self, vocab_size: int = 1 << 32) -> None:
        self._vocab_size = vocab_size

    def empty(self) -> Text:
        return []

    def read(self, raw: bytes) -> Text:
        ids = unpack_tokens(raw)
        if len(ids) and (largest := int(ids.max())) >= self._vocab_size:
            raise InvalidParameter(
                "tokens", largest, f"token ids go from 0 to {self._vocab_size - 1}"
            )
        tokens: list[int] = ids.tolist()
        return tokens

    def dump(self, text: Text) -> bytes:
        return pack_tokens(list(text))

    def compact(self, text: Text) -> Text:
        return array("I", text)

    def hashes(
        self, text: Text, block_size: int, *, salt: str, parent: int | None = None
    ) -> Hashes:
        assert isinstance(text, list)
        return block_hashes(text, block_size, salt=salt, parent=parent)


def joined(notation: Notation, *parts: Text | Sequence[int]) -> Text:
    """A new text: `parts`, one after the other."""
    text = notation.empty()
    for part in parts:
        text.extend(part)
    return text
