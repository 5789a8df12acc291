"""`mallee capsules` and the SDK's verbs for many capsules, at a running service."""

import json

import pytest
from click.testing import Result
from typer.testing import CliRunner

from mallee.cli.main import cli
from mallee.client import AsyncMallee, CapsuleCount, InvalidParameter, Mallee
from mallee.protocol.errors import BadRequest, ConfigError

pytestmark = pytest.mark.nats


def run(url: str, *arguments: str) -> Result:
    return CliRunner().invoke(cli, ["capsules", *arguments, "--url", url])


def test_capsules_are_listed_counted_and_deleted(url: str, client: Mallee) -> None:
    """F10, part: from the command line."""
    kept = client.prefill("a tree of many trunks")
    left = client.complete("from one root", max_tokens=3, n=2)
    client.prefill("mine", cache_salt="s")
    listed = json.loads(run(url, "list", "--json").stdout)["capsules"]
    names = sorted([kept.id, *(str(branch.capsule) for branch in left)])
    assert [each["id"] for each in listed] == names
    table = run(url, "list", "--pinned").stdout
    assert kept.id in table
    assert str(left[0].capsule) not in table
    assert len(json.loads(run(url, "list", "--limit", "1", "--json").stdout)["capsules"]) == 1
    counted = run(url, "count", "--pinned")
    assert counted.stdout == f"1 capsules of {kept.tokens} tokens\n"
    refused = run(url, "delete")
    assert isinstance(refused.exception, ConfigError)
    assert run(url, "delete", "--request", str(left[0].request_id)).stdout == "2 deleted\n"
    assert json.loads(run(url, "delete", "--all", "--json").stdout) == {"deleted": 1}
    assert run(url, "delete", "--all").stdout == "0 deleted\n"
    assert json.loads(run(url, "count", "--json", "--cache-salt", "s").stdout)["count"] == 1
    assert client.delete_capsules(all=True, cache_salt="s") == 1


async def test_both_clients_name_what_they_mean(url: str, client: Mallee) -> None:
    client.prefill("one")
    client.prefill("two")
    left = client.complete("three", max_tokens=2)
    assert client.count_capsules(pinned=True).count == 2
    assert [each.id for each in client.capsules(request=str(left[0].request_id))] == [
        left[0].capsule
    ]
    async with AsyncMallee(url) as other:
        assert await other.count_capsules(tier="device", pinned=False) == CapsuleCount(
            count=1, tokens=left[0].boundary or 0
        )
        assert [each.pinned for each in await other.capsules(pinned=True)] == [True, True]
        assert await other.delete_capsules(pinned=True) == 2
        with pytest.raises(BadRequest, match="say which capsules to delete"):
            await other.delete_capsules()
        with pytest.raises(InvalidParameter, match="give it alone"):
            await other.delete_capsules(all=True, tier="host")
    assert client.delete_capsules(min_age_s=0) == 1
