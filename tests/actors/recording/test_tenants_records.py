"""Records of several tenants in one folder: the parts of each, and nothing of the server's machine."""

from pathlib import Path

from msgspec import structs

from mallee.mocker.passes import mock_spec
from mallee.protocol.hashing import as_tokens
from mallee.protocol.ids import Scope
from mallee.protocol.messages import Limits
from mallee.protocol.model import WeightVersion
from mallee.router.config import RouterConfig
from mallee.router.dispatch.jobs import GenerateJob, QueueTerms
from mallee.sessions.record import Asked, Opened, Placed, read
from support.live_fleet import LiveFleet, running
from support.recording import recorder_in
from support.waiting import elapse

WEIGHTS = WeightVersion(3, "step-30", "/srv/models/step-30", "d1ge57")
SPEC = structs.replace(mock_spec(max_model_len=512), weights=WEIGHTS)
PROMPT = as_tokens(range(40))


def job(tenant: str, session: str) -> GenerateJob:
    terms = QueueTerms(tenant, session=session, owner=tenant, is_recorded=True)
    limits = Limits(4, ignore_eos=True)
    return GenerateJob(PROMPT, limits, scope=Scope(f"of {tenant}"), terms=terms)


async def test_a_tenant_fills_its_own_parts_and_no_record_has_a_path_of_the_server(
    tmp_path: Path,
) -> None:
    """F25, F7, part: `acme` asks for five records, and has two; `other` gets its own all the same."""
    stopped: list[str] = []
    options = {"most": 8, "most_each": 2, "count_stopped": stopped.append}
    recorder = recorder_in(tmp_path, SPEC, **options)
    made = LiveFleet(SPEC, RouterConfig(block_size=4), make_recorder=recorder)
    async with running(made, 1) as fleet:
        gateway = fleet.gateways[0]

        async def ask(tenant: str, session: str) -> bytes:
            async for _ in await gateway.start(job(tenant, session)):
                pass
            if session in ("3", "4", "5"):
                await elapse(0.1)
                return b""
            return await gateway.read_record(session, Scope(f"of {tenant}"))

        acme = [await ask("acme", str(i)) for i in range(1, 6)]
        other = [await ask("other", str(i)) for i in (1, 2)]
        assert [bool(raw) for raw in (*acme, *other)] == [
            True,
            True,
            False,
            False,
            False,
            True,
            True,
        ]
        assert set(stopped) == {"tenant_sessions"}
        await gateway.delete_record("1", Scope("of acme"))
        again = await ask("acme", "6")
        assert again, "a part that was deleted makes room for another"
    for raw in (*acme[:2], *other, again):
        assert b"/srv" not in raw
        entries = read(raw).entries
        weights = [e.weights for e in entries if isinstance(e, Asked | Placed)]
        weights += [e.model.weights for e in entries if isinstance(e, Opened)]
        assert len(weights) >= 3
        assert {(each.label, each.digest, each.path) for each in weights} == {
            ("step-30", "d1ge57", "")
        }
