"""A fleet refuses by name the requests that its engines can't do."""

from typing import Any, get_args

import pytest

from mallee.protocol.capabilities import REMEDIES, Capability, needs
from mallee.protocol.errors import NotSupported, from_wire
from mallee.protocol.events import Lease
from mallee.protocol.hashing import as_tokens
from mallee.protocol.ids import RequestId
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
from mallee.router.dispatch import dispatcher
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


def test_a_fleet_refuses_what_its_engines_lack() -> None:
    """Also to forks; other requests are placed. Nothing of a refused one is kept."""
    fleet = ModelFleet()
    worker = fleet.join("w0")
    lease = Lease(
        *(worker.name, worker.life, address_of(worker), "mock", "mock", BLOCK, 4096),
        *(4, 1 << 20, 0),
        lacks=("retain", "restore", "of newer ones"),
    )
    fleet.router.on_lease(lease)
    submit, prompt = fleet.dispatcher.submit, as_tokens([1, 2, 3])
    with pytest.raises(NotSupported, match="'retain'"):
        submit(RequestId("r"), GenerateJob(prompt, LIMITS, retain=SPANS))
    with pytest.raises(NotSupported, match="'restore'"):
        submit(RequestId("s"), ForkJob("c.0", [NO_TOKENS], LIMITS, resumes=True))
    assert not fleet.dispatcher.is_busy(worker.name)
    submit(RequestId("t"), GenerateJob(prompt, LIMITS))
    assert fleet.dispatcher.is_busy(worker.name)


def test_a_fleet_that_lacks_nothing_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check costs requests to our own engines no call."""
    monkeypatch.setattr(dispatcher, "needs", None)
    fleet = ModelFleet()
    worker = fleet.join("w0")
    fleet.dispatcher.submit(RequestId("r"), GenerateJob(as_tokens([1, 2, 3]), LIMITS, n=2))
    assert fleet.dispatcher.is_busy(worker.name)
