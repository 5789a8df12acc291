"""Events from workers to all gateways: blocks stored and removed, capsules made and released, leases.

One `EventBatch` per engine step. Each event has a sequence number; a batch carries `first_seq` and the
receiver counts on. `(worker, incarnation)` names one life of a worker: numbers start at 0 in each.
Hash runs are raw little-endian u64 bytes, 24 times cheaper to read than lists of ints
(measured). Encoding: msgpack arrays through msgspec, which validates while it decodes.
"""

from collections.abc import Sequence
from typing import Annotated, Final, TypeAlias

import msgspec
import numpy as np

from mallee.protocol.codec import Decoder, encode
from mallee.protocol.errors import CodecError
from mallee.protocol.hashing import Hashes
from mallee.protocol.ids import Incarnation, WorkerId
from mallee.protocol.model import BASE_WEIGHTS, WeightChange, WeightVersion

NUM_TIERS: Final = 3
"""Device, host memory, disk: 0, 1, 2."""


def pack_hashes(hashes: Hashes) -> bytes:
    """`hashes` as raw little-endian u64."""
    return np.ascontiguousarray(hashes, dtype="<u8").tobytes()


_HASH: Final = np.dtype("<u8")  # made once: from a string it is looked up in every call


def unpack_hashes(raw: bytes) -> Hashes:
    """The read-only uint64 array over `raw`, a run as messages have it."""
    return np.frombuffer(raw, _HASH)


def _check_run(raw: bytes) -> None:
    if len(raw) % 8:
        raise CodecError(f"hash run of {len(raw)} bytes is not a multiple of 8", nbytes=len(raw))


class _Event(msgspec.Struct, frozen=True, array_like=True):
    pass


class BlockEvent(_Event, frozen=True):
    """Chain hashes of blocks in one tier: 0 device, 1 host memory, 2 disk.

    `group`: of layers; 0 are those with full attention, others the model's sliding windows, in order.
    Raises CodecError for a run that is not whole numbers long.
    """

    hashes: bytes
    tier: Annotated[int, msgspec.Meta(ge=0, lt=NUM_TIERS)] = 0
    group: Annotated[int, msgspec.Meta(ge=0)] = 0

    def __post_init__(self) -> None:
        if len(self.hashes) % 8:
            _check_run(self.hashes)


class Stored(BlockEvent, frozen=True, tag="s"):
    """The worker now holds these blocks in `tier`."""


class Removed(BlockEvent, frozen=True, tag="r"):
    """The worker no longer holds these blocks in `tier`."""


class Cleared(_Event, frozen=True, tag="c"):
    """The worker holds nothing any more, capsules included."""


class CapsuleStored(_Event, frozen=True, tag="k"):
    """A capsule exists. `boundary` counts its committed tokens; `hashes` are its full blocks', or none.

    Capsules that finished answers leave behind come without hashes: there are many. `scope` is its owner's.
    `is_durable`: it is on disk, with its record.
    """

    capsule: str
    boundary: int
    hashes: bytes
    scope: str = ""
    is_durable: bool = False

    def __post_init__(self) -> None:
        _check_run(self.hashes)


class CapsuleReleased(_Event, frozen=True, tag="d"):
    """A capsule is gone: deleted, expired or evicted."""

    capsule: str


Event: TypeAlias = Stored | Removed | Cleared | CapsuleStored | CapsuleReleased


class EventBatch(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive events of one life of a worker: numbers first_seq .. first_seq + len - 1."""

    worker: WorkerId
    incarnation: Incarnation
    first_seq: int
    events: tuple[Event, ...]

    @property
    def next_seq(self) -> int:
        return self.first_seq + len(self.events)

    @property
    def items(self) -> tuple[Event, ...]:
        """The events, under the name that all numbered streams share."""
        return self.events


class Snapshot(msgspec.Struct, frozen=True, array_like=True):
    """All that a worker holds just before event `next_seq`; `hashes` are on its device."""

    worker: WorkerId
    incarnation: Incarnation
    next_seq: int
    hashes: bytes
    capsules: tuple[CapsuleStored, ...]
    host_hashes: bytes = b""
    disk_hashes: bytes = b""
    windows: tuple[bytes, ...] = ()  # hashes on the device, by window group

    def __post_init__(self) -> None:
        for raw in (*self.by_tier, *self.windows):
            _check_run(raw)

    @property
    def by_tier(self) -> tuple[bytes, ...]:
        """The hash runs of tiers 0, 1, 2."""
        return (self.hashes, self.host_hashes, self.disk_hashes)


class TierUse(msgspec.Struct, frozen=True, array_like=True):
    """Blocks below an engine's device, for metrics, and those moved so far. `num_*` only grow."""

    block_nbytes: int
    host_blocks: int
    host_held: int  # of those, by capsules
    disk_blocks: int
    num_offloaded: int = 0  # to host memory, as the device evicted them
    num_dropped: int = 0  # that found no room there
    num_parked: int = 0  # to host memory, for capsules
    num_spilled: int = 0  # to disk
    num_fetched_host: int = 0
    num_fetched_disk: int = 0
    num_declined: int = 0  # that were there, and cheaper to compute
    num_failed: int = 0  # moves that ended by an error
    num_fetched_peer: int = 0  # from other workers
    fetched_peer_s: float = 0.0  # seconds that this took
    host_room: int = 0  # blocks in host memory that could be had for capsules
    disk_limit_nbytes: int = 0  # 0: there is no disk
    num_unreadable: int = 0  # capsules that it found on disk and could not take in

    @property
    def blocks(self) -> dict[str, int]:
        """Those that lie there, by tier."""
        return {"host": self.host_blocks, "disk": self.disk_blocks}

    @property
    def moved_blocks(self) -> dict[str, int]:
        """Those moved so far, by the kind of the move."""
        return {
            "offload": self.num_offloaded,
            "park": self.num_parked,
            "spill": self.num_spilled,
            "fetch_host": self.num_fetched_host,
            "fetch_disk": self.num_fetched_disk,
            "fetch_peer": self.num_fetched_peer,
        }


class KeptUse(msgspec.Struct, frozen=True, array_like=True):
    """Capsules that were asked for and lie in one tier, and their blocks, as if they shared none."""

    capsules: int = 0
    blocks: int = 0


class StateUse(msgspec.Struct, frozen=True, array_like=True):
    """States of recurrent layers that an engine keeps to go on from, for metrics. `num_*` only grow."""

    by_reason: dict[str, int]  # what they were left for
    nbytes: int  # of each
    num_evicted: int


class EngineUse(msgspec.Struct, frozen=True, array_like=True):
    """Use of an engine's KV memory and its work so far, for metrics. `num_*` only grow."""

    total_blocks: int
    live_blocks: int  # in use by branches and capsules
    shared_blocks: int  # of those, by several
    cached_blocks: int  # in no use, kept for prefix hits
    readers: int  # branches and capsules
    kept_capsules: int  # explicit ones, not of answers
    num_copied_blocks: int  # on write
    num_evicted_blocks: int
    num_preemptions: int
    num_faults: int  # found by checks of the memory
    num_refused_capsules: int = 0  # that were to be kept, and had no room
    tiers: TierUse | None = None  # None: nothing lies below the device
    kept_below_bytes: int = 0  # texts and state of explicit capsules below the device
    num_lent_blocks: int = 0  # that other workers read
    references: int = 0  # entries of all readers' page tables
    constraint_states: int = 0  # of grammars, that branches and capsules hold
    block_nbytes: int = 0
    kept_by_tier: tuple[KeptUse, ...] = (KeptUse(), KeptUse(), KeptUse())
    num_prefill_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_forks: int = 0
    max_kept_blocks: int = 0  # that explicit capsules may hold
    used_blocks: int = 0  # that were ever in use
    num_drafted_tokens: int = 0  # by speculation
    num_accepted_tokens: int = 0  # of those, that were drawn
    num_ahead_rows: int = 0  # launched before their tokens were known
    num_ahead_void_rows: int = 0  # of those, in vain
    host_gap_s: float = 0.0  # that the device stood still while there was work; only grows
    states: StateUse | None = None  # None: the model has no recurrent layers


class MemoryUse(msgspec.Struct, frozen=True, array_like=True):
    """Bytes of the device's memory that a worker's process takes, for metrics."""

    weights: int
    kv: int
    other: int
    graphs: int = 0  # recorded decode steps


class FetchPrices(msgspec.Struct, frozen=True, array_like=True):
    """Seconds that a worker measured: to compute a prompt's token (0: not yet), to fetch blocks of a tier.

    `*_first_s`: until the first is on its way, behind the moves that have begun; `*_block_s`: each block.
    """

    token_s: float
    host_first_s: float
    host_block_s: float
    disk_first_s: float
    disk_block_s: float
    peer_first_s: float = 0.0  # from other workers; 0: not yet, or it borrows nothing
    peer_block_s: float = 0.0


class Load(msgspec.Struct, frozen=True, array_like=True):
    """Load of a worker, counted by its engine. Leases have it without `use`."""

    rows: int  # running branches
    waiting: int  # waiting branches
    active_blocks: int  # blocks in use; cached ones that could be evicted are not
    prefill_tokens: int  # prompt tokens of either that are still to be computed
    use: EngineUse | None = None
    fetch: FetchPrices | None = None  # None: nothing lies below the device
    block_nbytes: int = 0  # of KV that moves; 0: nothing lies below the device
    side_blocks: int = 0  # of windows and states, that move with a text beside its own


class LoanUse(msgspec.Struct, frozen=True, array_like=True):
    """Loans of KV between processes in one direction, for metrics. All but `num_open` only grow."""

    num_open: int
    num_granted: int
    num_refused: int
    num_failed: int
    nbytes: int
    seconds: float  # in which those crossed


class LendingUse(msgspec.Struct, frozen=True, array_like=True):
    """The loans of one worker: those that it got from others, and those that it gave."""

    borrowed: LoanUse
    lent: LoanUse


class Lease(msgspec.Struct, frozen=True, array_like=True):
    """A worker's registration, repeated every lease period.

    `next_seq` lets a gateway notice lost events while the worker is silent. `address` is what the
    transport needs to reach the worker. `is_draining`: it takes no new requests, those that run go on.
    `is_leaving` ends the lease at once. `kv_events` False: this worker never publishes events. `load` is
    at most a lease period older than the lease, or a step. `is_prefix_closed`: after every batch of its
    events it holds, with any block, all blocks before it on the path, which lets a router look at few
    blocks of a long one. `adapters`: LoRA adapters it has loaded. `host` answers a `HostAsk`
    about it; empty: the worker itself. `weights`: those of
    this life. `change`: the worker is on its way to others, or was; others begin another life. `metrics_at`:
    host and port of the process's metrics; empty: they are served nowhere. `device`: what it computes on,
    for people. `serves_kv`: other workers and gateways can read its KV, at the same `address`. `lacks`: the
    abilities (`protocol.capabilities`) that its engine has not; names that are not known are of newer ones.

    Old gateways read leases of new workers, and the other way round: fields come at the end, with a default,
    and those that go leave their place.
    """

    worker: WorkerId
    incarnation: Incarnation
    address: str
    model: str
    fingerprint: str
    block_size: int
    num_blocks: int
    max_rows: int
    max_model_len: int
    next_seq: int
    is_leaving: bool = False
    kv_events: bool = True
    load: Load | None = None
    is_prefix_closed: bool = False
    adapters: tuple[str, ...] = ()
    host: str = ""
    is_draining: bool = False
    weights: WeightVersion = BASE_WEIGHTS
    change: WeightChange | None = None
    windows: tuple[int, ...] = ()  # tokens that the layers of each window group read
    was_lends_at: str = ""  # an address for KV alone, of workers that were older; not read
    was_lending: object = None  # counters, of workers that were older; not read
    was_memory: object = None
    metrics_at: str = ""
    device: str = ""
    serves_kv: bool = False
    lacks: tuple[str, ...] = ()

    @property
    def is_finishing(self) -> bool:
        """Whether it takes nothing new, as its weights change when what runs is over."""
        return self.change is not None and self.change.state == "finishing"


class _OfWorker(msgspec.Struct, frozen=True, tag_field="verb"):
    worker: WorkerId


class AskSnapshot(_OfWorker, frozen=True, tag="snapshot"):
    """Answered with its Snapshot."""


class AskLoads(msgspec.Struct, frozen=True, tag_field="verb", tag="loads"):
    """Answered with a Load, with its engine's use, by worker."""


class AskDrain(_OfWorker, frozen=True, tag="drain"):
    """It takes nothing new, and leaves. Answered with its name, or nothing: it is not here."""


class AskWeights(_OfWorker, frozen=True, tag="weights"):
    """It is to serve `weights`; what runs on its old ones may end within `drain_s`. Answered as a drain."""

    weights: WeightVersion
    drain_s: float


class Join(_OfWorker, frozen=True, tag="join"):
    """A mocked worker is to begin a life. Answered with the state of the fleet, or an error, as JSON."""


class Crash(_OfWorker, frozen=True, tag="crash"):
    """A mocked worker is to end at once. Answered as Join."""


class ListWorkers(msgspec.Struct, frozen=True, tag_field="verb", tag="list"):
    """Answered as Join."""


Admin: TypeAlias = Join | Crash | ListWorkers
HostAsk: TypeAlias = AskSnapshot | AskLoads | AskDrain | AskWeights | Admin
"""A request to a host, in JSON: people may send it, too."""


decode_batch: Final = Decoder(EventBatch, "an event batch")
decode_snapshot: Final = Decoder(Snapshot, "a snapshot")
decode_lease: Final = Decoder(Lease, "a lease")
decode_host_ask: Final[Decoder[HostAsk]] = Decoder(
    HostAsk,  # type: ignore[arg-type] # a union
    "a request to a host",
    is_json=True,
)
encode_host_ask: Final = msgspec.json.Encoder().encode
decode_loads: Final = Decoder(dict[str, Load], "the loads of a host's workers")
_decode_leases: Final = Decoder(tuple[Lease, ...], "leases")


def encode_leases(leases: Sequence[Lease]) -> bytes:
    """Leases of one host as one message."""
    return encode(leases[0] if len(leases) == 1 else leases)


def decode_leases(raw: bytes) -> tuple[Lease, ...]:
    """The leases of a message: one alone, or several. Raises CodecError if it is neither."""
    try:
        return _decode_leases(raw)
    except CodecError:
        return (decode_lease(raw),)
