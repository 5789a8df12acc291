"""Made-up sources for models to learn: sessions with agents, and requests of any form."""

import numpy as np

from mallee.traces.workload import Request, Runs, Workload

SIZE = 16
SESSIONS = 60
TURNS = 6
SYSTEM = (6, 10)  # blocks of the two system prompts


def agents(seed: int = 0) -> Workload:
    """Sessions of a few turns over one of two system prompts, each growing; some spawn an agent."""
    return Workload("agents", SIZE, lambda: iter(turns(seed)), kind="agentic")


def turns(seed: int) -> list[Request]:
    rng = np.random.default_rng(seed)
    found: list[tuple[float, int, int, dict[str, object]]] = []
    fresh = 1000
    for session in range(SESSIONS):
        at_s = 20.0 * session + 5.0 * rng.random()
        system = session % 2
        root = (100 * system, SYSTEM[system])
        count = 2 + int(rng.integers(TURNS))
        for turn in range(count):
            grown = 12 * (turn + 1) + session % 3
            tail = int(rng.integers(SIZE))
            row = {
                "ids": Runs([root, (fresh, grown)]),
                "input_tokens": SIZE * (root[1] + grown) + tail,
                "output_tokens": int(rng.integers(5, 60)),
                "session": f"s{session}",
                "cls": "turn",
                "tool_wait_s": 1.0 if turn else 0.0,
            }
            found.append((at_s, session, turn, row))
            at_s += 2.0 + 3.0 * rng.random()
        if session % 4 == 0:
            found += agent(session, at_s, fresh + 100, rng)
        fresh += 500
    found.sort(key=lambda each: each[0])
    place = {(session, turn): i for i, (_, session, turn, _) in enumerate(found)}
    return [
        Request(i, at_s, wait_for=waits(place, session, turn), **row)  # type: ignore[arg-type]
        for i, (at_s, session, turn, row) in enumerate(found)
    ]


def agent(
    session: int, at_s: float, first: int, rng: np.random.Generator
) -> list[tuple[float, int, int, dict[str, object]]]:
    """Two turns of a sub-agent with a prompt of its own, after the first turn of its session."""
    return [
        (
            at_s - 1.0 + turn,
            session,
            100 + turn,
            {
                "ids": Runs([(200, 4), (first, 2 + turn)]),
                "input_tokens": SIZE * (6 + turn) + int(rng.integers(SIZE)),
                "output_tokens": 20,
                "session": f"s{session}",
                "cls": "agent",
                "tool_wait_s": 0.5,
            },
        )
        for turn in range(2)
    ]


def waits(place: dict[tuple[int, int], int], session: int, turn: int) -> tuple[int, ...]:
    before = place.get((session, 0 if turn == 100 else turn - 1))
    return () if before is None else (before,)


def anything(seed: int) -> Workload:
    """A few requests of a form that is drawn, too: sizes, rule, names, bursts, who waits, who is cut back."""
    rng = np.random.default_rng(seed)
    size = int(rng.choice([4, 16, 64]))
    has_partial, has_ids, has_names, has_waits = rng.random(4) < (0.5, 0.85, 0.6, 0.6)
    same_time = rng.random()
    names: dict[tuple[int, ...], int] = {}
    texts: dict[int, list[int]] = {}
    last: dict[int, int] = {}
    found: list[Request] = []
    at_s = 0.0
    for number in range(int(rng.integers(1, 30))):
        at_s += 0.0 if rng.random() < same_time else float(rng.exponential(10.0))
        session = int(rng.integers(4))
        text = texts.get(session, [])
        if rng.random() < 0.4:
            text = text[: int(rng.integers(len(text) + 1))]
        text = texts[session] = text + rng.integers(0, 3, rng.integers(6)).tolist()
        ids = [names.setdefault(tuple(text[: k + 1]), len(names)) for k in range(len(text))]
        rest = -(sum(text) % size) if has_partial and ids else int(rng.integers(size))
        waits = (last[session],) if has_names and has_waits and session in last else ()
        found.append(
            Request(
                number=number,
                arrival_s=at_s,
                ids=ids if has_ids else [],
                input_tokens=max(1, size * len(ids) + rest),
                output_tokens=int(rng.integers(1, 100)),
                session=f"s{session}" if has_names else "",
                cls=str(rng.choice(["turn", "agent"])),
                wait_for=waits,
                tool_wait_s=float(rng.random()) if waits else 0.0,
                branches=int(rng.choice([1, 1, 1, 3])),
            )
        )
        last[session] = number
    return Workload("anything", size, lambda: iter(found))
