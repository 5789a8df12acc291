"""Budgets: accounts against a brute-force model, and over HTTP on a tiny real model."""

import asyncio
import json
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mallee.actors.http.branches.budgets import Account, Budget, Budgets
from mallee.protocol.errors import BudgetSpent, InvalidParameter
from mallee.protocol.ids import CapsuleId, RequestId
from mallee.testing.random_model import random_model
from support.tiny_fleet import post, tiny_api
from support.waiting import until

MODEL = random_model("llama", 5, max_position_embeddings=2048)
ASKED = {"prompt": "A tree of many trunks", "ignore_eos": True, "seed": 3, "temperature": 1.0}


class Tree:
    """The rule for accounts, counted anew from what happened to each request."""

    def __init__(self) -> None:
        self.parents: list[int | None] = []  # the account above, by account
        self.limits: list[int | None] = []
        self.drawn: list[int] = []  # by requests that share the account, not below
        self.running: list[int] = []

    def below(self, account: int) -> list[int]:
        return [i for i, parent in enumerate(self.parents) if parent == account]

    def is_open(self, account: int) -> bool:
        return self.running[account] > 0 or any(map(self.is_open, self.below(account)))

    def spent(self, account: int) -> int:
        """Tokens that were drawn by it and below."""
        return self.drawn[account] + sum(map(self.spent, self.below(account)))


@settings(max_examples=120, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 3),  # begin, draw, end, or begin with a budget
            st.integers(0, 1 << 16),
            st.integers(1, 12),
        ),
        max_size=60,
    )
)
def test_no_tree_draws_more_than_its_budget_and_what_is_unspent_returns(
    steps: list[tuple[int, int, int]],
) -> None:
    """X19, part: in any order of begins, draws and ends, at any depth."""
    budgets, tree = Budgets(lambda: 0.0), Tree()
    root = budgets.begin(Budget(tokens=40), None, 1)
    assert root is not None
    budgets.keep(RequestId("r0"), root)
    tree.parents, tree.limits, tree.drawn, tree.running = [None], [40], [0], [1]
    accounts: list[Account] = [root]
    names: list[int] = [0]  # the account of each request
    runs: list[int] = [0]  # requests that run, as accounts
    for kind, pick, amount in steps:
        if kind in (0, 3):
            of = pick % len(names)
            above = names[of]
            budget = Budget(tokens=amount) if kind == 3 else None
            try:
                account = budgets.begin(budget, CapsuleId(f"r{of}-3.1"), 1)
            except (BudgetSpent, InvalidParameter):
                continue
            assert account is not None
            if budget is not None:
                accounts.append(account)
                tree.parents.append(above)
                tree.limits.append(amount)
                tree.drawn.append(0)
                tree.running.append(0)
            mine = accounts.index(account)
            assert mine == (len(accounts) - 1 if budget is not None else above)
            budgets.keep(RequestId(f"r{len(names)}"), account)
            names.append(mine)
            runs.append(mine)
            tree.running[mine] += 1
        elif runs and kind == 1:
            mine = runs[pick % len(runs)]
            num = int(min(amount, accounts[mine].rest("tokens")))
            accounts[mine].spend("tokens", num)
            tree.drawn[mine] += num
        elif runs:
            mine = runs.pop(pick % len(runs))
            accounts[mine].close()
            tree.running[mine] -= 1
        for i, limit in enumerate(tree.limits):
            assert limit is None or tree.spent(i) <= limit
            assert accounts[i].is_idle == (not tree.is_open(i))
            if i == 0 and tree.is_open(0):
                # Nothing is reserved by what is idle: the rest is all but what is drawn or reserved.
                held = tree.drawn[0] + sum(_held(tree, accounts, child) for child in tree.below(0))
                assert accounts[0].rest("tokens") == 40 - held
    while runs:
        accounts[runs.pop()].close()
    root.open()
    assert root.rest("tokens") == 40 - tree.spent(0)


def _held(tree: Tree, accounts: list[Account], account: int) -> int:
    """An account's part of its parent: all that was drawn, and its rest and below while it is open."""
    held = tree.drawn[account] + sum(_held(tree, accounts, c) for c in tree.below(account))
    return held + (int(accounts[account].rest("tokens")) if tree.is_open(account) else 0)


def test_a_child_reserves_of_its_parent_until_it_ends() -> None:
    """X19, part: more than the rest is refused by name; branches and time are inherited."""
    now = 0.0
    budgets = Budgets(lambda: now)
    root = budgets.begin(Budget(100, 4, 60.0), None, 2)
    assert root is not None
    budgets.keep(RequestId("r"), root)
    capsule = CapsuleId("r.0")
    child = budgets.begin(Budget(tokens=70), capsule, 1)
    assert child is not None
    assert (root.rest("tokens"), child.rest("tokens"), child.rest("branches")) == (30, 70, 1)
    with pytest.raises(InvalidParameter, match=r"budget\.tokens.*31.*30 left"):
        budgets.begin(Budget(tokens=31), capsule, 1)
    with pytest.raises(BudgetSpent, match="1 are left, 2 are asked for"):
        budgets.begin(None, capsule, 2)
    child.spend("tokens", 20)
    child.close()
    assert root.rest("tokens") == 80
    now = 60.0
    with pytest.raises(BudgetSpent, match="wall_s"):
        budgets.begin(None, capsule, 1)


def test_what_is_remembered_is_bounded_and_what_runs_is_not_forgotten() -> None:
    """X19, part: the oldest idle one goes."""
    budgets = Budgets(lambda: 0.0, max_kept=2)
    made = [budgets.begin(Budget(tokens=1), None, 1) for _ in range(3)]
    for i, account in enumerate(made):
        assert account is not None
        if i == 1:
            account.close()
        budgets.keep(RequestId(f"r{i}"), account)
    kept = [budgets.of_request(RequestId(f"r{i}")) for i in range(3)]
    assert kept == [made[0], None, made[2]]


def _ends(answer: dict[str, Any]) -> list[tuple[str, str | None]]:
    return [(c["finish_reason"], c["mallee"].get("ended_by")) for c in answer["choices"]]


@pytest.mark.parametrize("stream", [False, True])
async def test_branches_end_at_their_budget_with_the_text_of_an_undisturbed_run(
    stream: bool,
) -> None:
    """X19, part: exactly as many tokens, each branch a prefix; KV is free, and forks share what is left."""
    async with tiny_api(MODEL, 1) as (client, fleet):
        alone = await post(client, "/v1/completions", **ASKED, n=3, max_tokens=300)
        engine = next(iter(fleet.engines.values()))
        body = {**ASKED, "n": 3, "max_tokens": 300, "mallee": {"budget": {"tokens": 100}}}
        answer = await (_streamed if stream else _whole)(client, body)
        assert answer["usage"]["completion_tokens"] == 100
        assert _ends(answer) == [("budget", "tokens")] * 3
        for cut, whole in zip(answer["choices"], alone["choices"], strict=True):
            assert 0 < len(cut["text"]) < 300
            assert whole["text"].startswith(cut["text"])
        await until(lambda: not engine.branches)
        capsule = answer["choices"][0]["mallee"]["capsule"]
        spent = await client.post(f"/v1/capsules/{capsule}/fork", json={"n": 1})
        assert (spent.status_code, spent.json()["error"]["code"]) == (409, "budget_spent")


async def test_forks_of_its_capsules_spend_what_a_request_left() -> None:
    """X19, part: also of a fork's, and of a rewound one; the next branch is one too many."""
    async with tiny_api(MODEL, 1) as (client, _):
        budget = {"budget": {"tokens": 50, "branches": 4}}
        first = await post(client, "/v1/completions", **ASKED, max_tokens=10, mallee=budget)
        capsule = first["choices"][0]["mallee"]["capsule"]
        back = await post(client, f"/v1/capsules/{capsule}/rewind", to=12)
        more = {"ignore_eos": True, "max_tokens": 20}
        own = {"budget": {"tokens": 15}}
        second = await post(client, f"/v1/capsules/{back['id']}/fork", n=1, **more, mallee=own)
        assert second["usage"]["completion_tokens"] == 15
        assert _ends(second) == [("budget", "tokens")]
        leaf = second["choices"][0]["mallee"]["capsule"]
        whole = {"ignore_eos": True, "max_tokens": 200, "n": 2}
        third = await client.post(f"/v1/capsules/{capsule}/fork", json=whole)
        assert third.json()["usage"]["completion_tokens"] == 25
        for again in (leaf, capsule):
            answer = await client.post(f"/v1/capsules/{again}/fork", json={"n": 1})
            assert answer.json()["error"]["code"] == "budget_spent"


async def test_branches_end_when_their_time_is_over() -> None:
    """X19, part: `wall_s`, while tokens come and while none does."""
    async with tiny_api(MODEL, 1) as (client, _):
        body = {**ASKED, "n": 2, "max_tokens": 1900, "mallee": {"budget": {"wall_s": 0.2}}}
        answer = await asyncio.wait_for(post(client, "/v1/completions", **body), 20)
        assert _ends(answer) == [("budget", "wall_s")] * 2
        assert answer["usage"]["completion_tokens"] < 3800


@pytest.mark.parametrize(
    ("budget", "named"),
    [
        ({}, "mallee.budget"),
        ({"tokens": 0}, "mallee.budget.tokens"),
        ({"branches": -1}, "mallee.budget.branches"),
        ({"wall_s": 0}, "mallee.budget.wall_s"),
        ({"wall_s": 1e9}, "mallee.budget.wall_s"),
        ({"token": 5}, "mallee.budget"),
        ({"branches": 1}, "budget"),
    ],
)
async def test_a_budget_that_cannot_be_is_refused_by_name(budget: Any, named: str) -> None:
    """X19, part: so is one of a request that draws nothing."""
    async with tiny_api(MODEL, 1) as (client, _):
        asked = {**ASKED, "n": 2, "mallee": {"budget": budget}}
        answer = await client.post("/v1/completions", json=asked)
        assert answer.status_code in (400, 409)
        assert named in answer.text
        prefill = {"prompt": "x", "mallee": {"budget": {"tokens": 5}}}
        none = await client.post("/v1/capsules", json=prefill)
        assert (none.status_code, none.json()["error"]["param"]) == (400, "mallee.budget")


async def _whole(client: httpx.AsyncClient, body: dict[str, Any]) -> dict[str, Any]:
    return await post(client, "/v1/completions", **body)


async def _streamed(client: httpx.AsyncClient, body: dict[str, Any]) -> dict[str, Any]:
    """The chunks as one answer."""
    return await streamed(client, "/v1/completions", body)


async def streamed(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The chunks of an answer put together."""
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
    choices: dict[int, dict[str, Any]] = {}
    usage: Any = None
    async with client.stream("POST", path, json=asked) as response:
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            usage = chunk["usage"] or usage
            for choice in chunk["choices"]:
                index = choice["index"]
                before = choices.get(index, {"text": ""})["text"]
                choices[index] = {**choice, "text": before + choice["text"]}
    return {"choices": [choices[i] for i in sorted(choices)], "usage": usage}
