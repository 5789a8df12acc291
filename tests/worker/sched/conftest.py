"""A scheduler with a tree and nobody who computes: plans are carried out by appending token 1."""

from collections import Counter
from collections.abc import Callable, Container
from typing import Any

import pytest

from bench.mocker.policies import make_order
from mallee.protocol.hashing import NO_HASHES
from mallee.protocol.messages import Generate, Limits, Share
from mallee.worker.kv.audit import check_tree
from mallee.worker.kv.journal import Journal
from mallee.worker.kv.node import Node
from mallee.worker.kv.pool import BlockPool
from mallee.worker.kv.tree import BranchTree
from mallee.worker.sched.branch import Branch, ForkPoint, Job
from mallee.worker.sched.plan import Plan
from mallee.worker.sched.policy import SchedulerConfig
from mallee.worker.sched.scheduler import Scheduler


class NothingToReclaim:
    def reclaim(self, num_blocks: int, kept: Container[Node]) -> bool:
        return num_blocks <= 0

    def reclaim_any(self) -> bool:
        return False

    def num_reclaimable(self, kept: Container[Node]) -> int:
        return 0


class Rig:
    """Adds branches by name, steps, and remembers who was served when."""

    def __init__(
        self,
        *,
        num_blocks: int = 512,
        block_size: int = 4,
        policy: str = "fair",
        victims: str = "least_due",
        **config: Any,
    ) -> None:
        settings: dict[str, Any] = {"max_step_tokens": 16, "max_rows": 8, "watermark": 0.0}
        settings["order"] = make_order(policy, victims)
        self.config = SchedulerConfig(**(settings | config)).validate(1)
        self.tree = BranchTree(BlockPool(num_blocks), block_size, Journal())
        self.scheduler = Scheduler(self.config, self.tree, reclaimer=NothingToReclaim())
        self.branches: dict[str, Branch] = {}
        self.outputs: dict[str, int] = {}  # tokens still to be drawn
        self.failed: list[str] = []
        self.served: list[dict[str, int]] = []  # by step: tokens computed or drawn by name
        self.order: list[list[str]] = []  # by step: names in the order of the batch
        self._names: dict[Branch, str] = {}
        self._next_token = 0

    def add(
        self,
        name: str,
        prompt: int | list[int] = 1,
        *,
        outputs: int = 1 << 30,
        session: str = "",
        weight: float = 1.0,
        tenant: str = "",
        tenant_weight: float = 1.0,
        priority: float = 0.0,
        origin: Node | None = None,
    ) -> Branch:
        """A branch with a prompt of that many tokens (all different from others'), or of these."""
        if isinstance(prompt, int):
            prompt = [self._next_token + i for i in range(prompt)]
            self._next_token += len(prompt)
        if origin is not None:
            self.tree.hold(origin)
        ticket = len(self.branches) + 1
        share = Share(session, weight, priority, tenant, tenant_weight)
        job = Job(Generate(name, b"", Limits(outputs), share=share), "g", "")
        base = origin.end if origin else 0
        start = ForkPoint(base, base, [], origin)
        branch = Branch(job, (0,), ticket, list(prompt), start, origin)
        self.branches[name] = branch
        self._names[branch] = name
        self.outputs[name] = outputs
        self.scheduler.add([branch])
        return branch

    def step(self, *, is_checked: bool = True) -> dict[str, int]:
        """One step; what it served, by name."""
        plan = self.scheduler.plan()
        served = self._carry_out(plan)
        for branch, _ in plan.failed:
            self.failed.append(self._names[branch])
            self.scheduler.finish(branch, is_failed=True)
        for name in served:
            if self.outputs[name] <= 0:
                self.scheduler.finish(self.branches[name])
        self.scheduler.follow(plan)
        self.served.append(served)
        if is_checked:
            self.check()
        return served

    def run(self, num_steps: int) -> list[dict[str, int]]:
        return [self.step() for _ in range(num_steps)]

    def drain(self, max_steps: int = 5000) -> int:
        """Steps until nothing is left to do."""
        for i in range(max_steps):
            if not self.scheduler.has_work:
                return i
            self.step(is_checked=False)
        raise AssertionError(f"still working after {max_steps} steps")

    def total(self, key: Callable[[str], str], begin: int = 0) -> Counter[str]:
        """Tokens served from step `begin` on, by key of the name."""
        total: Counter[str] = Counter()
        for served in self.served[begin:]:
            for name, n in served.items():
                total[key(name)] += n
        return total

    def capsule(self, num_tokens: int) -> Node:
        """A held node with that many computed tokens."""
        node = self.tree.attach(NO_HASHES, "")
        node = self.tree.reserve(node, num_tokens).node
        self._next_token += num_tokens
        self.tree.commit(node, range(self._next_token - num_tokens, self._next_token))
        return node

    def check(self) -> None:
        self.scheduler.check()
        check_tree(self.tree)

    def _carry_out(self, plan: Plan) -> dict[str, int]:
        served: dict[str, int] = {}
        drew = [*plan.ready, *plan.decodes]
        for branch in plan.decodes:
            assert branch.node is not None
            self.tree.commit(branch.node, branch.pending(1))
        for chunk in plan.chunks:
            assert chunk.branch.node is not None
            self.tree.commit(chunk.branch.node, chunk.tokens)
            served[self._names[chunk.branch]] = len(chunk.tokens)
            if chunk.is_last:
                drew.append(chunk.branch)
        rows = [*plan.decodes, *(chunk.branch for chunk in plan.chunks)]
        assert len(rows) <= self.config.max_rows
        computed = len(plan.decodes) + sum(len(chunk.tokens) for chunk in plan.chunks)
        assert computed <= self.config.max_step_tokens
        assert len(set(rows)) == len(rows), "a branch is twice in a step"
        self.order.append([self._names[s] for s in rows])
        for branch in drew:
            branch.logits = None
            branch.tokens.append(1)
            name = self._names[branch]
            served.setdefault(name, 1)
            self.outputs[name] -= 1
        return served


@pytest.fixture(scope="session")
def make_rig() -> Callable[..., Rig]:
    return Rig
