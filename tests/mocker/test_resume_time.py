"""A turn after a tool call, during which others took the memory: its first token is as early as at once."""

import math
from typing import Any

from mallee.mocker.tiers import TierConfig
from mallee.protocol.messages import (
    Command,
    Demote,
    Fork,
    Generate,
    Limits,
    Prefill,
    Promote,
    RetainSpan,
    pack_tokens,
)
from mallee.worker.records import EngineConfig
from mallee.worker.sched.policy import SchedulerConfig
from support.conforming import Time, make_mocked

PROMPT = list(range(1200))
RESULT = list(range(5000, 5016))  # of the tool
TIERS = TierConfig(host_tokens=8192, host_bytes_s=4e9, host_latency_s=1e-3, token_nbytes=1 << 16)


class Worker:
    """A mocked engine in virtual time, with memory for two prompts."""

    def __init__(self, tiers: TierConfig | None = None) -> None:
        self.time = Time()
        config = EngineConfig(SchedulerConfig(max_step_tokens=512), 0, max_retained_share=0.9)
        self.mocked = make_mocked(self.time, config, num_blocks=620, tiers=tiers)

    def first_news_s(self, command: Command) -> float:
        """Seconds until the first token of a request, or the reply to it; then it runs to its end."""
        request: Any = command
        begun, found = self.time.now, math.inf
        self.mocked.submit(command)
        while True:
            end = self.mocked.start(self.time.now)
            if end is not None:
                self.time.now = end
                frames = self.mocked.finish_raw().frames.values()
                news = [each for frame in frames for each in (*frame.updates, *frame.replies)]
                assert not any(each.error for each in news)
                if any(each.request == request.request for each in news):
                    found = min(found, self.time.now - begun)
            elif self.mocked.next_due < math.inf:
                self.time.now = self.mocked.next_due
            else:
                return found

    def turn_s(self, name: str, tokens: list[int], *spans: RetainSpan) -> float:
        request = Generate(name, pack_tokens(tokens), Limits(8, ignore_eos=True), retain=spans)
        return self.first_news_s(request)

    def fork_s(self, name: str) -> float:
        fork = Fork(name, "p.0", (pack_tokens(RESULT),), Limits(8, ignore_eos=True))
        return self.first_news_s(fork)

    def call_tool(self) -> None:
        """Others' prompts take all memory that is to be had meanwhile."""
        for i in range(4):
            self.turn_s(f"other{i}", [10_000 * (i + 1) + j for j in range(1100)])


def test_a_retained_turn_resumes_as_early_as_one_at_once() -> None:
    """X17: within 10 %, where it takes many times as long without retention."""
    found = {}
    for name, spans, has_tool in (
        ("resident", (), False),
        ("retained", (RetainSpan(len(PROMPT), 80, 60.0),), True),
        ("lost", (), True),
    ):
        worker = Worker()
        worker.turn_s("turn", PROMPT, *spans)
        if has_tool:
            worker.call_tool()
        found[name] = worker.turn_s("next", PROMPT + RESULT)
    assert found["retained"] <= 1.1 * found["resident"]
    assert found["lost"] > 3 * found["resident"]


def test_a_promoted_capsule_resumes_as_early_as_one_that_never_left() -> None:
    """X17: demoted for the time of the tool call; the fork of one still below waits for its fetch."""
    found = {}
    for name in ("resident", "promoted", "below"):
        worker = Worker(TIERS)
        worker.first_news_s(Prefill("p", pack_tokens(PROMPT)))
        if name != "resident":
            worker.first_news_s(Demote("down", "p.0", 1))
            worker.call_tool()
        if name == "promoted":
            worker.first_news_s(Promote("up", "p.0"))
        found[name] = worker.fork_s("next")
    assert found["promoted"] <= 1.1 * found["resident"]
    assert found["below"] > 1.5 * found["resident"]
