"""D16, S13: what the planner skips when nobody has to be chosen between changes no plan."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mallee.worker.sched.planner import Planner
from mallee.worker.sched.prefill import Prompts, StepBudget
from mallee.worker.sched.running import BlockBudget
from support.examples import examples


def _fill(self: Prompts, budget: StepBudget, but: int = 0) -> None:
    """`Prompts.fill` without a shortcut."""
    kept = min(but, max(1, budget.rows - 1), max(1, budget.tokens // 2))
    budget.tokens -= kept
    budget.rows -= kept
    self.serve_aged(budget)
    if self._policy.is_fair:
        self._fill_short(budget)
    while (head := self.head(budget)) is not None:
        self.grant(budget, head, budget.tokens)
    budget.tokens += kept
    budget.rows += kept


def _is_contended(self: Planner, budget: StepBudget, left: int) -> bool:
    """`Planner._is_contended`, however many sessions live."""
    head = self._prompts.head(budget)
    if head is None:
        return False
    if left == 0:
        return self._prompts.have_aged(budget.step) or self._displaces(head)
    if not self._policy.is_fair:
        return False
    ours, most = head.job.session, self._config.max_step_tokens / 2
    return any(self._sessions.is_ahead(s, ours, most) for s in self._running.by_session)


def _promised(self: BlockBudget) -> int:
    """`BlockBudget._promised`, counted anew each time."""
    return sum(self._lacking(s) for s in self._running.prefills)


def _scene(draw: st.DrawFn) -> tuple[dict[str, Any], int, list[tuple[dict[str, Any], int]]]:
    """A rig's settings, tokens of a capsule, and branches with the steps after each."""
    rig = {
        "policy": draw(st.sampled_from(["fair", "fcfs", "prefill_first", "decode_round_robin"])),
        "num_blocks": draw(st.sampled_from([12, 20, 60])),
        "max_rows": draw(st.integers(1, 5)),
        "max_step_tokens": draw(st.integers(1, 12)),
        "ageing_steps": draw(st.sampled_from([0, 4, 20])),
        "watermark": draw(st.sampled_from([0.0, 0.1])),
        "chunked": True,
    }
    branches = []
    for _ in range(draw(st.integers(1, 9))):
        branch = {
            "prompt": draw(st.integers(1, 16)),
            "outputs": draw(st.integers(1, 18)),
            "session": draw(st.sampled_from("aab")),
            "tenant": draw(st.sampled_from(["", "t"])),
            "weight": draw(st.sampled_from([0.5, 1.0, 4.0])),
            "priority": float(draw(st.integers(-1, 1))),
            "forks": draw(st.booleans()),
        }
        branches.append((branch, draw(st.integers(0, 4))))
    return rig, draw(st.integers(1, 9)), branches


def _story(make_rig: Callable[..., Any], scene: Any) -> tuple[Any, Any, Any]:
    """Tokens and branches of each step, and the number of preemptions.

    Not the order in a batch: it follows block ids, and blocks that are taken one by one may be others than
    those taken together.
    """
    config, capsule, branches = scene
    rig = make_rig(**config)
    trunk = rig.capsule(capsule)
    for i, (branch, num_steps) in enumerate(branches):
        options = dict(branch)
        prompt, origin = options.pop("prompt"), trunk if options.pop("forks") else None
        rig.add(f"b{i}", prompt, origin=origin, **options)
        rig.run(num_steps)
    rig.drain(3000)
    rows = [sorted(names) for names in rig.order]
    return rig.served, rows, rig.scheduler.stats().num_preemptions


@examples(80)
@given(scene=st.composite(_scene)())
def test_shortcuts_change_no_plan(make_rig: Callable[..., Any], scene: Any) -> None:
    """One prompt, one session, promised blocks kept up: the same plans as without any of these."""
    short = _story(make_rig, scene)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Prompts, "fill", _fill)
        patch.setattr(Planner, "_is_contended", _is_contended)
        patch.setattr(BlockBudget, "_promised", _promised)
        assert _story(make_rig, scene) == short
