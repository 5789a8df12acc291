"""Random faults of fleets in virtual time."""

import random

from mallee.mocker.replay.fleet.faults import Crash, Drain, Fault, Join, Outage, Restart, Slow


def random_faults(seed: int, begin_s: float = 0.0, *, drains: int = 1) -> list[Fault]:
    """A story of a fleet of three that never ends without anybody alive; `drains`: the weight of them."""
    rng = random.Random(seed)
    faults: list[Fault] = []
    now, alive, dead, outage_until = begin_s, ["w0", "w1", "w2"], [], 0.0
    slow_until: dict[str, float] = {}
    kinds = ["crash", "crash", "restart", *["drain"] * drains, "join", "slow", "outage"]
    for _ in range(rng.randint(1, 7)):
        now += rng.random() * 0.4
        kind = rng.choice(kinds)
        worker = rng.choice(alive)
        if kind == "crash" and len(alive) > 1:
            faults.append(Crash(now, worker))
            alive.remove(worker)
            dead.append(worker)
        elif kind == "restart":
            back = rng.choice([*dead, worker])
            faults.append(Restart(now, back))
            if back in dead:
                dead.remove(back)
                alive.append(back)
        elif kind == "drain" and len(alive) > 1:
            faults.append(Drain(now, worker))
            alive.remove(worker)
        elif kind == "join":
            name = f"w{3 + sum(isinstance(f, Join) for f in faults)}"
            faults.append(Join(now, name))
            alive.append(name)
        elif kind == "slow" and slow_until.get(worker, 0.0) <= now:
            duration = rng.random()
            faults.append(Slow(now, worker, rng.choice([0.5, 3.0]), duration))
            slow_until[worker] = now + duration
        elif kind == "outage" and outage_until <= now:
            duration = rng.random() / 2
            faults.append(Outage(now, duration))
            outage_until = now + duration
    return faults
