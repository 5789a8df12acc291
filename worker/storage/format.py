"""Words that all of storage uses: keys, pieces of bytes, checksums, and the identity of KV."""

import json
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import xxhash

from mallee.protocol.errors import IncompatibleCapsule
from mallee.protocol.hashing import Hashes

LAYOUT: Final = "storage_version"  # the field by which what has another version is refused

Piece = bytes | bytearray | memoryview
Keys = Hashes | Sequence[int]
Rows = npt.NDArray[np.uint8] | Sequence[Piece]  # a block each, every one contiguous

checksum = xxhash.xxh3_64_intdigest


class Identity:
    """The fields by which KV fits or doesn't: name to value."""

    def __init__(self, fields: Mapping[str, str]) -> None:
        self.fields = dict(sorted(fields.items()))
        self.digest: bytes = xxhash.xxh3_128_digest(json.dumps(self.fields).encode())

    def check(self, capsule: str, theirs: Mapping[str, str]) -> None:
        """Raises IncompatibleCapsule if `theirs` differ in any field."""
        if theirs != self.fields:
            raise self.refusal(capsule, theirs)

    def refusal(self, capsule: str, theirs: Mapping[str, str]) -> IncompatibleCapsule:
        """The error that names the fields in which `theirs` differ."""
        names = sorted(self.fields.keys() | theirs.keys())
        both = [(name, theirs.get(name, ""), self.fields.get(name, "")) for name in names]
        return IncompatibleCapsule(capsule, [each for each in both if each[1] != each[2]])


def with_block_nbytes(fields: Mapping[str, str], block_nbytes: int) -> dict[str, str]:
    """The fields of an identity, with the size of its blocks among them."""
    return {**fields, "block_nbytes": str(block_nbytes)}


def as_bytes(keys: Keys) -> bytes:
    return np.asarray(keys, dtype="<u8").tobytes()


def as_keys(packed: bytes) -> list[int]:
    found: list[int] = np.frombuffer(packed, dtype="<u8").tolist()
    return found
