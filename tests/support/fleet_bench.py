"""A router with a fleet around it, a clock by hand, and shorthand for what the world tells it."""

from dataclasses import replace
from typing import Any

from mallee.protocol.events import Event, EventBatch, Lease, Stored, pack_hashes
from mallee.protocol.hashing import Hashes, block_hashes
from mallee.protocol.ids import CapsuleId, RequestId, WorkerId
from mallee.router.config import RouterConfig
from mallee.router.placement.fanouts import Part
from mallee.router.placement.placer import Placement
from mallee.router.router import Router

SIZE = 4


class FleetBench:
    """Workers w0, w1 .. with real routing state; `router.check()` after every step."""

    def __init__(
        self,
        num_workers: int,
        *,
        num_blocks: int = 10_000,
        is_prefix_closed: bool = True,
        **config: Any,
    ) -> None:
        self.now = 0.0
        base = RouterConfig(block_size=SIZE, max_workers=16, lease_s=3.0)
        self.router = Router(replace(base, **config), clock=lambda: self.now)
        self.num_blocks = num_blocks
        self.is_prefix_closed = is_prefix_closed
        self.seq: dict[tuple[str, int], int] = {}
        for i in range(num_workers):
            self.lease(f"w{i}")

    def lease(self, worker: str, life: int = 1, **changes: Any) -> bool:
        fields = {
            "worker": worker,
            "incarnation": life,
            "address": f"{worker}/{life}",
            "model": "m",
            "fingerprint": "f",
            "block_size": SIZE,
            "num_blocks": self.num_blocks,
            "max_rows": 8,
            "max_model_len": 4096,
            "next_seq": self.seq.get((worker, life), 0),
            "is_prefix_closed": self.is_prefix_closed,
        }
        needs_snapshot = self.router.on_lease(Lease(**{**fields, **changes}))
        self.router.check()
        return needs_snapshot

    def events(self, worker: str, *events: Event, life: int = 1) -> bool:
        first_seq = self.seq.get((worker, life), 0)
        self.seq[worker, life] = first_seq + len(events)
        needs_snapshot = self.router.on_events(EventBatch(worker, life, first_seq, events))
        self.router.check()
        return needs_snapshot

    def route(self, name: str, tokens: list[int], **options: Any) -> Placement:
        options.setdefault("max_tokens", 8)
        placement = self.router.route(
            RequestId(name), hashes(tokens), prompt_tokens=len(tokens), **options
        )
        self.router.check()
        return placement

    def book(self, name: str, tokens: list[int], worker: str, **options: Any) -> Part:
        """Books a request where it would not go by price: as a fork of an empty capsule there."""
        options.setdefault("max_tokens", 8)
        capsule = CapsuleId(f"capsule of {name}")
        self.router.learn_capsule(capsule, WorkerId(worker), 0, hashes([]))
        (part,) = self.router.route_fanout(
            [RequestId(name)],
            hashes(tokens),
            prompt_tokens=0,
            suffix_tokens=[len(tokens)],
            capsule=capsule,
            can_recompute=False,
            **options,
        )
        self.router.forget_capsule(capsule)
        self.router.check()
        return part

    def fork(self, names: str, capsule: str, suffix_tokens: list[int], **options: Any) -> Placement:
        """Forks of a capsule that stay with it, under one name."""
        options.setdefault("max_tokens", 8)
        (part,) = self.router.route_fanout(
            [RequestId(names)],
            hashes([]),
            prompt_tokens=0,
            suffix_tokens=suffix_tokens,
            capsule=CapsuleId(capsule),
            can_recompute=False,
            **options,
        )
        self.router.check()
        return part.placement

    def fan_out(
        self, name: str, tokens: list[int], rows: int, *, parts: int = 16, **options: Any
    ) -> tuple[Part, ...]:
        options.setdefault("max_tokens", 8)
        placed = self.router.route_fanout(
            [RequestId(f"{name}.{i}") for i in range(parts)],
            hashes(tokens),
            prompt_tokens=len(tokens),
            suffix_tokens=[0] * rows,
            **options,
        )
        self.router.check()
        return placed


def hashes(tokens: list[int]) -> Hashes:
    return block_hashes(tokens, SIZE)


def stored(tokens: list[int], tier: int = 0) -> Stored:
    return Stored(pack_hashes(hashes(tokens)), tier)


def prompt(family: int, length: int = 40) -> list[int]:
    return [family * 1000 + i for i in range(length)]
