"""Shape and identity of a model, for parts of the system that don't load it."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Final, Literal

import msgspec

WINDOW_SHARE = 4
"""A window group has a block for this many of the full group's: right for texts of four windows and more."""
MIN_WINDOW_BLOCKS = 256
"""Up to so many blocks a window group has as many as the full group: there is nothing to save."""
STATE_SHARE = 64
"""A state group has a slot for this many of the full group's blocks: a thousand tokens of the usual ones."""
MIN_STATES = 64
FEWEST_STATES = 16
"""A state group has at least `MIN_STATES` slots. Where these would take most of a small memory it has one for
16 blocks, and at least `FEWEST_STATES`: a running branch takes two. It never has more than the full group."""


def first_read(window: int, num_tokens: int, block_size: int) -> int:
    """The first block that layers with `window` read after `num_tokens` tokens."""
    return max(0, num_tokens - window + 1) // block_size


def most_read(window: int, block_size: int) -> int:
    """Blocks that a text needs to go on in layers with `window`, at most."""
    return -(-window // block_size) + 2


class GroupSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Layers whose KV comes and goes together; a block of theirs is the KV of one block's tokens.

    "full": every token is read as long as the text lives. "window": a token reads the last `window`,
    itself included. "state": recurrent layers, whose state after a token is all that they keep of a text; its
    slots are this group's blocks. `nbytes`: of the KV of one token, or of one state.
    """

    kind: Literal["full", "window", "state"]
    layers: tuple[int, ...]
    nbytes: int
    window: int | None = None

    def nbytes_per_block(self, block_size: int) -> int:
        return self.nbytes if self.kind == "state" else self.nbytes * block_size

    def rows_per_block(self, full: "GroupSpec", block_size: int) -> int:
        """Rows of the size of a block of the `full` group that one of this group takes."""
        return -(-self.nbytes_per_block(block_size) // full.nbytes_per_block(block_size))

    def num_read(self, num_tokens: int, block_size: int) -> int:
        """Blocks that are read after `num_tokens` tokens."""
        end = -(-num_tokens // block_size)
        match self.kind:
            case "full":
                return end
            case "state":
                return min(1, end)
            case "window":
                return end - first_read(self.reach, num_tokens, block_size)

    @property
    def reach(self) -> int:
        """The window of which a block before a place tells whether all is there that is read after it.

        Of a state that is the block that ends there.
        """
        return 2 if self.window is None else self.window

    def num_blocks(self, num_full: int, block_size: int) -> int:
        """Blocks of this group beside `num_full` of the full one. No text needs more of it than of that."""
        match self.kind:
            case "full":
                return num_full
            case "state":
                least = min(MIN_STATES, max(num_full // 16, FEWEST_STATES))
                return min(num_full, max(num_full // STATE_SHARE, least))
            case "window":
                least = max(4 * most_read(self.reach, block_size), MIN_WINDOW_BLOCKS)
                return min(num_full, max(num_full // WINDOW_SHARE, least))


class WeightVersion(msgspec.Struct, frozen=True, order=True, array_like=True):
    """One state of a fleet's weights, of the same config; of two the larger is the newer.

    `number` counts changes from 0, the weights that workers start with; `label` is the operator's name
    for it. `path` is where they were loaded from ("": where the model is configured to be), `digest` what
    was found there. Equal labels with other numbers or digests are other versions.
    """

    number: int = 0
    label: str = "base"
    path: str = ""
    digest: str = ""

    def covers(self, asked: "WeightVersion") -> bool:
        """Whether these are the weights that were `asked` for, whose digest may be open, or newer ones."""
        own = (self.number, self.label, self.path)
        theirs = (asked.number, asked.label, asked.path)
        return own > theirs or (own == theirs and asked.digest in ("", self.digest))


BASE_WEIGHTS: Final = WeightVersion()


class WeightChange(msgspec.Struct, frozen=True, array_like=True):
    """A worker's way to other weights, for its lease.

    state: "loading", read beside the old ones; "finishing" what runs on those, and nothing new; "failed" for
    `reason`, and the old ones serve on.
    """

    target: WeightVersion
    state: str
    reason: str = ""


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Shape and identity of one servable model.

    `fingerprint` changes with anything that changes a token or a KV byte: config, weights, dtype.
    Capsules and block hashes of different fingerprints never meet, nor those of different `weights`:
    `fingerprint` is that of the weights that workers start with, and stays when they change.
    """

    name: str
    fingerprint: str
    vocab_size: int
    max_model_len: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype_nbytes: int
    eos_token_ids: tuple[int, ...]
    weights: WeightVersion = BASE_WEIGHTS
    groups: tuple[
        GroupSpec, ...
    ] = ()  # the first is the full one; it has all layers if none is given
    kv_fields: tuple[tuple[str, str], ...] = ()  # `kv_identity` of the weights at the start

    def __post_init__(self) -> None:
        if not self.groups:
            nbytes = 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype_nbytes
            every = GroupSpec(kind="full", layers=tuple(range(self.num_layers)), nbytes=nbytes)
            msgspec.structs.force_setattr(self, "groups", (every,))

    @property
    def has_states(self) -> bool:
        """Whether some layers are recurrent."""
        return any(group.kind == "state" for group in self.groups)

    @property
    def state_nbytes(self) -> int:
        """Bytes of the states of recurrent layers after a token."""
        return sum(group.nbytes for group in self.groups if group.kind == "state")

    def side_rows(self, num_tokens: int, block_size: int) -> int:
        """Rows of the sides, as they are stored and sent, that are read after `num_tokens` of a text."""
        return sum(
            group.num_read(num_tokens, block_size)
            * group.rows_per_block(self.groups[0], block_size)
            for group in self.sides
        )

    @property
    def sides(self) -> tuple[GroupSpec, ...]:
        """The groups beside the full one."""
        return self.groups[1:]

    def kv_nbytes(self, num_blocks: int, block_size: int) -> int:
        """Bytes of KV memory in which the full group has `num_blocks` blocks."""
        return sum(
            group.num_blocks(num_blocks, block_size) * group.nbytes_per_block(block_size)
            for group in self.groups
        )

    def block_nbytes(self, block_size: int) -> int:
        """Bytes of a block as it is stored and sent: one of the full group, or a row of a side's."""
        return self.groups[0].nbytes_per_block(block_size)

    def kv_identity(self) -> dict[str, str]:
        """Everything that a byte of KV depends on, by name: models that differ in a field share none."""
        fields = dict(self.kv_fields) or {
            "dtype_nbytes": str(self.dtype_nbytes),
            "fingerprint": self.fingerprint,
            "head_dim": str(self.head_dim),
            "kv_heads": str(self.num_kv_heads),
            "layers": str(self.num_layers),
        }
        fields["weight_version"] = self.weights.label
        if self.weights.digest:
            fields["weights"] = self.weights.digest
        return fields

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of the keys and values of a token, in all groups."""
        return sum(group.nbytes for group in self.groups if group.kind != "state")

    @property
    def identity(self) -> str:
        """The fingerprint with the weights: state of different identities never meets."""
        weights = self.weights
        if weights == BASE_WEIGHTS:
            return self.fingerprint
        return f"{self.fingerprint}@{weights.number}:{len(weights.label)}:{weights.label}:{weights.digest}"

    def salt(self, tenant: str = "", adapter: str = "") -> str:
        """The salt of block hashes: those of other models, weights, LoRA adapters or tenants never match."""
        # With its length, or adapter "a" with tenant "b/c" would be adapter "a/b" with tenant "c".
        of_adapter = f"+{len(adapter)}:{adapter}" if adapter else ""
        return f"{self.identity}{of_adapter}/{tenant}"


def fingerprint(config: Mapping[str, Any], weights_digest: str, dtype: str) -> str:
    """16 hex digits over config, weights digest and dtype; key order does not matter."""
    text = json.dumps([dict(config), weights_digest, dtype], sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
