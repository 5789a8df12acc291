"""Every query of every panel and alert, asked of a real Prometheus that scrapes a real deployment."""

import asyncio
import json
import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from bench.boards.chart import DASHBOARDS, RULES, alerts, dashboard, targets
from bench.boards.deployment import Deployment, deployment
from bench.boards.pictures import fill, values_of
from bench.boards.prometheus import Prometheus, missing, prometheus
from bench.boards.traffic import Traffic
from support.mock_scene import make_folder
from support.waiting import wait_until

pytestmark = [
    *(pytest.mark.process, pytest.mark.ray, pytest.mark.nats, pytest.mark.slow),
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
]

SETTINGS = (
    *("gateways=2", "workers=2", "mock.engines_per_worker=2", "scheduler.max_rows=8"),
    *("engine.kv_tokens=16384", "mock.host_kv_tokens=8192", "mock.disk_kv_tokens=65536"),
)
CHAT = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
NO_LOANS = "mocked engines lend each other nothing"
NO_BYTES = "blocks below the device have no bytes in mocked engines"

# Titles of panels, and alerts, that have no data here, and why. One that has some is a fault, too.
NO_KEYS = "no key is set"
NO_ROUTER = "`mallee router` is another process"
EMPTY = {
    "worker: Memory of the processes: {{part}}": "mocked engines load no weights",
    "worker: Room that capsules take below the device: disk, {{worker}}": NO_BYTES,
    "worker: Share of drafted tokens that were drawn: {{worker}}": "nothing is drafted",
    "worker: Loans: {{direction}}": NO_LOANS,
    "worker: Bytes lent: {{worker}}": NO_LOANS,
    "worker: Refused and failed loans, open ones: refused in a second": NO_LOANS,
    "worker: Refused and failed loans, open ones: failed in a second": NO_LOANS,
    "worker: Refused and failed loans, open ones: open": NO_LOANS,
    "MalleeGatewaysAbsent": "`absent` has a value only where there is no gateway",
    "MalleeDiskTierFull": NO_BYTES,
    "MalleeLoansFail": NO_LOANS,
    "fleet: Until a key or a certificate expires: {{of}}": NO_KEYS,
    "fleet: Until a key or a certificate expires: {{gateway}} refuses its file of keys": NO_KEYS,
    "MalleeExpiresSoon": NO_KEYS,
    "router: Forwarded requests: {{end}}": NO_ROUTER,
    "router: Forwarded requests: continued, {{how}}": NO_ROUTER,
    "router: Backends by what is known of their caches: {{state}}": NO_ROUTER,
    "router: Prompt blocks known on the backend: share": NO_ROUTER,
    "MalleeBackendsGone": NO_ROUTER,
    "MalleeBackendAway": NO_ROUTER,
    "MalleeBackendPredicted": NO_ROUTER,
}


class Served(NamedTuple):
    deployment: Deployment
    server: Prometheus


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Two gateways and four workers after all kinds of requests, and after one process of workers died."""
    folder = tmp_path_factory.mktemp("deployment")
    model = make_folder(folder)
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT}))
    with (
        deployment(folder, str(model), SETTINGS) as found,
        prometheus(found.scrapes(), [RULES]) as server,
    ):
        wait_until(lambda: has_all_processes(server), timeout_s=30)
        asyncio.run(ask(found))
        yield Served(found, server)


def has_all_processes(server: Prometheus) -> bool:
    """Two gateways and two processes of workers are scraped."""
    return len(server.query("up == 1")) == 4


async def ask(found: Deployment) -> None:
    async with Traffic(found, words=40, max_tokens=32) as traffic:
        await traffic.each_once()
        async with asyncio.TaskGroup() as group:
            group.create_task(traffic.run(8, clients=12))
            await asyncio.sleep(3)
            found.workers()[0].kill()


def has_data(server: Prometheus, expression: str) -> bool:
    """Whether some series has a number: those that are divided by 0 have none."""
    return any(math.isfinite(value) for s in server.query(expression) for _, value in s.values)


@pytest.mark.parametrize("name", DASHBOARDS)
def test_every_query_of_every_panel_has_data_or_a_reason_for_none(
    served: Served, name: str
) -> None:
    board = dashboard(name)
    variables = values_of(served.server, board, __rate_interval="20s", __range="1m")
    empty = {
        f"{name}: {panel['title']}: {target.get('legendFormat', '')}"
        for panel, target in targets(board)
        if not has_data(served.server, fill(target["expr"], variables))
    }
    assert empty == {key for key in EMPTY if key.startswith(f"{name}: ")}


def test_every_measure_of_every_alert_has_data_or_a_reason_for_none(served: Served) -> None:
    """Whether its bounds are met or not; spans of hours look at the minute that there is."""
    empty = set()
    for name, rule in alerts().items():
        expression = re.sub(r"\) ([<>]) ([\d.]+)(?=\n|$)", r") \1 bool \2", rule["expr"])
        assert expression != rule["expr"], name
        if not has_data(served.server, expression.replace(":30s]", ":1s]")):
            empty.add(name)
    assert empty == {key for key in EMPTY if key.startswith("Mallee")}


def test_prometheus_evaluates_every_rule(served: Served) -> None:
    rules = [rule for group in served.server.get("rules")["groups"] for rule in group["rules"]]
    assert {rule["name"] for rule in rules} == alerts().keys()
    assert {rule["health"] for rule in rules} == {"ok"}


def test_the_death_of_a_worker_is_an_alert_with_its_figures(served: Served) -> None:
    def told() -> list[Any]:
        return [
            alert["annotations"]["summary"]
            for alert in served.server.get("alerts")["alerts"]
            if alert["labels"]["alertname"] == "MalleeFailovers"
        ]

    wait_until(lambda: bool(told()), timeout_s=10)
    assert re.fullmatch(r"\d+ branches had to go on elsewhere, for their worker died\.", told()[0])
