"""Nodes of `mallee up` and the network between them, under faults: no request of others fails."""

import os

import pytest

from mallee.actors.nodes import network
from support.benches import run_bench

pytestmark = [pytest.mark.ray, pytest.mark.alone, pytest.mark.nats, pytest.mark.model]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_faults_of_nodes_fail_no_request() -> None:
    """X4, X8, K28, part: a node, its link or a NATS server lost or mute, and an upgrade, under 16 streams."""
    if os.geteuid() != 0 or (cause := network.obstacle()) is not None:
        pytest.skip(f"needs root and namespaces: {cause if os.geteuid() == 0 else 'no root'}")
    found, table = run_bench("nodes", "--quick", timeout_s=800)
    gateways = found["gateway's node killed"]
    others = ["none", "NATS server killed", "cut", "mute", "node killed", "rolling upgrade"]
    for name in others:
        assert found[name]["failed"] == 0, table
    for name in [*others, "gateway's node killed"]:
        assert found[name]["requests"] > 0, table
        assert found[name]["wrong"] == 0, table
    for name in others[:-1]:  # the new gateways of an upgrade know nothing of old capsules
        assert found[name]["equal_capsules"] == found[name]["capsules"], table
    assert gateways["unclean_ends"] == 0, table
    assert gateways["failed"] <= gateways["streams"], table
    assert gateways["cut_s_max"] < 15.0, table
