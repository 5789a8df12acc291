"""Requests go where their worker's engine can do them; where none can, they are refused by name."""

from typing import Any, get_args

import pytest

from mallee.protocol.capabilities import REMEDIES, Capability, needs
from mallee.protocol.errors import NotSupported, from_wire
from mallee.protocol.events import Lease
from mallee.protocol.messages import (
    END_OF_TEXT,
    Fork,
    Generate,
    Grammar,
    Holder,
    Inject,
    Limits,
    Prefill,
    Promote,
    ReasoningBudget,
    RetainSpan,
)
from mallee.router.dispatch.jobs import ForkJob, GenerateJob, PrefillJob
from mallee.router.dispatch.texts import NO_TOKENS
from support.model_fleet import BLOCK, ModelFleet, address_of

LIMITS = Limits(4)
SPANS = (RetainSpan(END_OF_TEXT, 9, 60.0),)
LENT = (Holder("w", 1, "a", 4, "r.0"),)
INSIDE = Grammar("regex", "a+", 2)


@pytest.mark.parametrize(
    ("command", "found"),
    [
        (Generate("r", b"", LIMITS), set()),
        (Generate("r", b"", LIMITS, grammar=Grammar("lark", "start: /a/")), set()),
        (Generate("r", b"", LIMITS, grammar=INSIDE), {"grammar_state"}),
        (Generate("r", b"", Limits(4, reasoning=ReasoningBudget(1, 2))), {"reasoning_budgets"}),
        (Generate("r", b"", LIMITS, retain=SPANS), {"retain"}),
        (Fork("r", "c.0", (b"",), LIMITS, resumes=True), {"restore"}),
        (Prefill("r", b"", holders=LENT), {"loans"}),
        (Prefill("r", b"", grammar=INSIDE), set()),
        (Inject("r", "of", 0, b""), {"inject"}),
        (Promote("r", "c.0"), {"tiers"}),
    ],
)
def test_commands_say_what_they_need(command: Any, found: set[str]) -> None:
    assert needs(command) == found


@pytest.mark.parametrize(
    "job",
    [
        GenerateJob(NO_TOKENS, LIMITS, grammar=INSIDE),
        GenerateJob(NO_TOKENS, LIMITS, retain=SPANS),
        ForkJob("c.0", [NO_TOKENS], LIMITS, resumes=True),
        PrefillJob(NO_TOKENS, holders=LENT),
    ],
)
def test_a_job_needs_what_its_command_needs(job: Any) -> None:
    assert needs(job) == needs(job.command("r"))


def test_each_ability_has_a_remedy_and_its_refusal_crosses_processes() -> None:
    assert REMEDIES.keys() == set(get_args(Capability))
    error = from_wire(NotSupported("tiers", REMEDIES["tiers"]).to_wire())
    assert isinstance(error, NotSupported)
    assert error.status == 400


def test_a_request_goes_to_a_worker_that_can_do_it() -> None:
    fleet = ModelFleet()
    workers = [fleet.join(name) for name in ("w0", "w1")]
    for worker, lacks in zip(workers, (("retain", "of newer ones"), ()), strict=True):
        lease = Lease(
            *(worker.name, worker.life, address_of(worker), "mock", "mock", BLOCK, 4096),
            *(4, 1 << 20, 0),
            lacks=lacks,
        )
        fleet.router.on_lease(lease)
    needed = frozenset[Capability](("retain",))
    assert fleet.router.able(frozenset()) is None
    assert fleet.router.able(frozenset(("inject",))) is None
    assert fleet.router.able(needed) == ["w1"]
    fleet.router.lose_worker(workers[1].name, workers[1].life)
    with pytest.raises(NotSupported, match="'retain'"):
        fleet.router.able(needed)
