"""Kinds of traces that models meet, each made by a mechanism of its own, not by a model's.

Each function makes about as many requests as it is asked for, the same for the same seed.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from mallee.traces.workload import Request, Runs, Workload

Run = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Context:
    """Text so far: whole blocks as (first id, how many), and tokens; `key` is the text's own."""

    key: int
    runs: tuple[Run, ...]
    tokens: int


@dataclass(frozen=True, slots=True)
class Call:
    """One request, before all are put into order; `waits` are places in the list of calls."""

    at_s: float
    context: Context
    answer: int
    session: str = ""
    cls: str = "turn"
    waits: tuple[int, ...] = ()
    tool_s: float = 0.0
    branches: int = 1


class Texts:
    """Names blocks of `size` tokens, of partial ones too if `ceil`: equal id, equal text up to there."""

    def __init__(self, size: int, *, ceil: bool) -> None:
        self.size = size
        self.ceil = ceil
        self.empty = Context(0, (), 0)
        self._next_key = 1
        self._next_id = 0
        self._known: dict[tuple[object, ...], Context] = {}
        self._partial: dict[int, int] = {}

    def add(self, context: Context, tokens: int, what: object = None) -> Context:
        """`tokens` more; the same `what` after the same context is the same text, without it is new."""
        if what is not None and (found := self._known.get((context.key, what))):
            return found
        total = context.tokens + tokens
        count = total // self.size - context.tokens // self.size
        runs = context.runs
        if count:
            runs = joined(runs, (self._ids(count), count))
        made = Context(self._key(), runs, total)
        if what is not None:
            self._known[context.key, what] = made
        return made

    def ids(self, context: Context) -> Runs:
        runs = context.runs
        if self.ceil and context.tokens % self.size:
            if context.key not in self._partial:
                self._partial[context.key] = self._ids(1)
            runs = (*runs, (self._partial[context.key], 1))
        return Runs(runs)

    def workload(self, name: str, calls: list[Call], *, until_s: float = float("inf")) -> Workload:
        """The calls up to `until_s` by time, numbered."""
        order = sorted(
            (i for i, call in enumerate(calls) if call.at_s <= until_s),
            key=lambda i: (calls[i].at_s, i),
        )
        place = {index: number for number, index in enumerate(order)}
        first_s = calls[order[0]].at_s
        requests = [
            Request(
                number=number,
                arrival_s=calls[index].at_s - first_s,
                ids=self.ids(calls[index].context),
                input_tokens=max(1, calls[index].context.tokens),
                output_tokens=max(1, calls[index].answer),
                session=calls[index].session,
                cls=calls[index].cls,
                wait_for=tuple(sorted(place[w] for w in calls[index].waits if w in place)),
                tool_wait_s=calls[index].tool_s,
                branches=calls[index].branches,
            )
            for number, index in enumerate(order)
        ]
        return Workload(name, self.size, lambda: iter(requests))

    def _key(self) -> int:
        self._next_key += 1
        return self._next_key - 1

    def _ids(self, count: int) -> int:
        self._next_id += count
        return self._next_id - count


def joined(runs: tuple[Run, ...], run: Run) -> tuple[Run, ...]:
    if runs and sum(runs[-1]) == run[0]:
        return (*runs[:-1], (runs[-1][0], runs[-1][1] + run[1]))
    return (*runs, run)


Rng = np.random.Generator
Family = Callable[[int, int], Workload]


def tokens(rng: Rng, median: float, sigma: float = 0.8, least: int = 1) -> int:
    return max(least, int(rng.lognormal(math.log(median), sigma)))


def zipf(rng: Rng, among: int, power: float = 1.0) -> int:
    weights = 1.0 / np.arange(1, among + 1) ** power
    return int(rng.choice(among, p=weights / weights.sum()))


def tool_agents(requests: int, seed: int) -> Workload:
    """Tool prompts by Zipf, a few turns whose answers come back, begins in bursts; no session names."""
    rng = np.random.default_rng([seed, 1])
    texts = Texts(512, ceil=True)
    prompts = [texts.add(texts.empty, tokens(rng, 3500, 0.7), ("tool", k)) for k in range(80)]
    calls: list[Call] = []
    at_s = 0.0
    while len(calls) < requests:
        at_s += rng.exponential(3.0)
        for _ in range(int(rng.geometric(0.4))):
            conversation(texts, rng, calls, prompts[zipf(rng, 80)], at_s, "", turns=0.35, gap_s=15)
    return texts.workload("tool agents", calls, until_s=at_s)


def conversation(
    texts: Texts,
    rng: Rng,
    calls: list[Call],
    context: Context,
    at_s: float,
    session: str,
    *,
    turns: float,
    gap_s: float,
    asked: float = 600,
    told: float = 250,
) -> None:
    """Turns until chance `turns` ends it; answers are part of the next prompt."""
    while True:
        context = texts.add(context, tokens(rng, asked))
        answer = tokens(rng, told)
        calls.append(Call(at_s, context, answer, session))
        if rng.random() < turns:
            return
        context = texts.add(context, answer)
        at_s += 1.0 + 0.01 * answer + rng.lognormal(math.log(gap_s), 1.0)


def chats(requests: int, seed: int, *, named: bool = True) -> Workload:
    """Chats of 16-token ids over a day's rate, most of a single turn; named by chat, or by nobody."""
    rng = np.random.default_rng([seed, 2])
    texts = Texts(16, ceil=False)
    systems = [texts.add(texts.empty, tokens(rng, 200, 1.0), ("system", k)) for k in range(40)]
    calls: list[Call] = []
    at_s, number = 0.0, 0
    while len(calls) < requests:
        rate = 0.6 * (1.0 + 0.8 * math.sin(2 * math.pi * at_s / 2400.0))
        at_s += rng.exponential(1.0 / rate)
        number += 1
        system = systems[zipf(rng, 40)] if rng.random() < 0.7 else texts.empty
        turns = 1.0 if rng.random() < 0.6 else 0.3
        name = f"chat{number}" if named else ""
        conversation(
            texts, rng, calls, system, at_s, name, turns=turns, gap_s=60, asked=120, told=300
        )
    return texts.workload("chats" if named else "chats without names", calls, until_s=at_s)


def turn_takers(requests: int, seed: int) -> Workload:
    """An orchestrator and agents of one session wait for each other and keep contexts of their own.

    Each agent has instructions that a few sessions use; the next turn is anybody's.
    """
    rng = np.random.default_rng([seed, 17])
    texts = Texts(64, ceil=False)
    roles = [texts.add(texts.empty, tokens(rng, 1800, 0.4), ("role", k)) for k in range(24)]
    calls: list[Call] = []
    at_s, number = 0.0, 0
    while len(calls) < requests:
        at_s += rng.exponential(90.0)
        number += 1
        cast = rng.choice(len(roles), int(rng.integers(3, 6)), replace=False).tolist()
        held = {role: texts.add(roles[role], tokens(rng, 500)) for role in cast}
        now_s, waits = at_s, ()
        for _ in range(int(rng.geometric(0.05))):
            for role in (cast[0], cast[1 + int(rng.integers(len(cast) - 1))]):
                answer = tokens(rng, 200)
                calls.append(Call(now_s, held[role], answer, f"s{number}", waits=waits))
                waits = (len(calls) - 1,)
                now_s += 0.5 + 0.02 * answer + rng.exponential(2.0)
                held[role] = texts.add(held[role], answer + tokens(rng, 400))
    return texts.workload("turn takers", calls, until_s=at_s)


def spawns(requests: int, seed: int) -> Workload:
    """Calls that spawn children, with roots of their own or the parent's context; three ways to join."""
    rng = np.random.default_rng([seed, 4])
    texts = Texts(64, ceil=False)
    main = texts.add(texts.empty, 6000, "main")
    child = texts.add(texts.empty, 2500, "child")
    calls: list[Call] = []
    at_s, number = 0.0, 0
    while len(calls) < requests:
        at_s += rng.exponential(45.0)
        number += 1
        agent(texts, rng, calls, texts.add(main, tokens(rng, 800)), child, at_s, f"s{number}", 0)
    return texts.workload("spawns", calls, until_s=at_s)


def agent(
    texts: Texts,
    rng: Rng,
    calls: list[Call],
    context: Context,
    child: Context,
    at_s: float,
    session: str,
    level: int,
    waits: tuple[int, ...] = (),
) -> tuple[int, float]:
    """Some calls, of which some spawn; the place of its last call, and when that ends."""
    tool_s = 0.0
    end_s = at_s
    for _ in range(int(rng.geometric(0.15 if level == 0 else 0.3))):
        answer = tokens(rng, 200)
        calls.append(Call(at_s, context, answer, session, f"level{level}", waits, tool_s))
        me = len(calls) - 1
        end_s = at_s + 0.5 + 0.02 * answer
        waits, tool_s = (me,), rng.lognormal(0.7, 1.0)
        context = texts.add(context, answer + tokens(rng, 500))
        if level < 2 and rng.random() < (0.2 if level == 0 else 0.1):
            ends = []
            is_fork = rng.random() < 0.4
            for _ in range(int(rng.integers(2, 6))):
                begun = context if is_fork else child
                begun = texts.add(begun, tokens(rng, 300))
                ends.append(
                    agent(texts, rng, calls, begun, child, end_s, session, level + 1, (me,))
                )
            ends.sort(key=lambda each: each[1])
            wanted = (len(ends), 1, max(1, len(ends) // 2))[int(rng.integers(3))]
            waits = (me, *(place for place, _ in ends[:wanted]))
            end_s = max(end_s, ends[wanted - 1][1])
        at_s = end_s + tool_s
    return me, end_s


def best_of(requests: int, seed: int) -> Workload:
    """The same prompt several times at once; one answer is gone on from."""
    rng = np.random.default_rng([seed, 5])
    texts = Texts(64, ceil=True)
    system = texts.add(texts.empty, 900, "system")
    calls: list[Call] = []
    at_s, number = 0.0, 0
    while len(calls) < requests:
        at_s += rng.exponential(20.0)
        number += 1
        context, now_s, width = system, at_s, int(rng.integers(2, 9))
        for _ in range(int(rng.geometric(0.25))):
            context = texts.add(context, tokens(rng, 200))
            answers = [tokens(rng, 150) for _ in range(width)]
            calls += [Call(now_s, context, answer, f"s{number}") for answer in answers]
            context = texts.add(context, answers[0])
            now_s += 1.0 + 0.02 * max(answers) + rng.exponential(3.0)
    return texts.workload("best of n", calls, until_s=at_s)


def retries(requests: int, seed: int) -> Workload:
    """Turns of which a third is sent again, up to four times; no session names."""
    rng = np.random.default_rng([seed, 6])
    texts = Texts(512, ceil=True)
    system = texts.add(texts.empty, 2000, "system")
    calls: list[Call] = []
    at_s = 0.0
    while len(calls) < requests:
        at_s += rng.exponential(8.0)
        context, now_s = system, at_s
        for _ in range(int(rng.geometric(0.3))):
            context = texts.add(context, tokens(rng, 1500))
            answer = tokens(rng, 300)
            for _ in range(1 if rng.random() < 0.67 else int(rng.integers(2, 5))):
                calls.append(Call(now_s, context, answer))
                now_s += 2.0 + rng.exponential(2.0)
            context = texts.add(context, answer)
            now_s += rng.exponential(20.0)
    return texts.workload("retries", calls, until_s=at_s)


def retrieval(requests: int, seed: int) -> Workload:
    """One system prompt, then documents by Zipf in any order, then a question; single turns."""
    rng = np.random.default_rng([seed, 7])
    texts = Texts(64, ceil=False)
    system = texts.add(texts.empty, 700, "system")
    sizes = [tokens(rng, 600, 0.5) for _ in range(300)]
    calls: list[Call] = []
    at_s = 0.0
    for _ in range(requests):
        at_s += rng.exponential(0.8)
        context = system
        for document in dict.fromkeys(zipf(rng, 300, 1.2) for _ in range(4)):
            context = texts.add(context, sizes[document], ("document", document))
        calls.append(Call(at_s, texts.add(context, tokens(rng, 60)), tokens(rng, 120)))
    return texts.workload("retrieval", calls)


def two_tenants(requests: int, seed: int) -> Workload:
    """Tenants with nothing in common: a steady one, and one that is on and off."""
    rng = np.random.default_rng([seed, 11])
    texts = Texts(64, ceil=False)
    roots = [texts.add(texts.empty, 2000, "steady"), texts.add(texts.empty, 5000, "bursty")]
    calls: list[Call] = []
    number, at_s = 0, [0.0, 0.0]
    while len(calls) < requests:
        tenant = int(at_s[1] < at_s[0])
        number += 1
        gap_s = rng.exponential(6.0)
        if tenant:
            is_over = rng.random() < 0.03
            gap_s = rng.exponential(300.0) if is_over else rng.exponential(0.5)
        at_s[tenant] += gap_s
        conversation(
            texts, rng, calls, roots[tenant], at_s[tenant], f"s{number}", turns=0.3, gap_s=10
        )
    return texts.workload("two tenants", calls, until_s=min(at_s))


def without_ids(requests: int, seed: int) -> Workload:
    rng = np.random.default_rng([seed, 15])
    at_s = np.cumsum(rng.gamma(0.3, 5.0, requests)).tolist()
    rows = [Request(i, at, (), tokens(rng, 1000), tokens(rng, 200)) for i, at in enumerate(at_s)]
    return Workload("without ids", 512, lambda: iter(rows))


def single_turns(requests: int, seed: int) -> Workload:
    """Rows that share nothing but, by Zipf, one of ten prompts."""
    rng = np.random.default_rng([seed, 16])
    texts = Texts(512, ceil=True)
    prompts = [texts.add(texts.empty, tokens(rng, 2000), ("prompt", k)) for k in range(10)]
    chosen = rng.integers(0, 10, requests)
    at_s = np.cumsum(rng.exponential(0.2, requests)).tolist()
    calls = [
        Call(at, texts.add(prompts[k], tokens(rng, 900)), tokens(rng, 200))
        for at, k in zip(at_s, chosen.tolist(), strict=True)
    ]
    return texts.workload("single turns", calls)


def unnamed_chats(requests: int, seed: int) -> Workload:
    return chats(requests, seed, named=False)


FAMILIES: Final[dict[str, Family]] = {
    each.__name__: each
    for each in (
        *(tool_agents, chats, unnamed_chats, turn_takers, spawns, best_of, retries, retrieval),
        *(two_tenants, single_turns, without_ids),
    )
}
