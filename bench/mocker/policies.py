"""Orders of a scheduler that the product's (`fair`) is compared with, and rules for who gives way.

    fcfs                the oldest first, decodes before prompts; shares and priorities count for nothing
    prefill_first       as fcfs, but prompts before decodes: first tokens soon, later ones unevenly
    decode_round_robin  as fcfs, but decodes take turns when not all have room in a step

Victims, when blocks run out; without a rule the one that is least due, as in the product:

    youngest            the youngest, whatever its priority
    oldest_decode       the oldest of those that decode (the order of vLLM's and Dynamo's simulators)
"""

from typing import Final

from mallee.worker.sched.branch import Branch
from mallee.worker.sched.policy import Order


class Fcfs(Order):
    is_fair = False

    def rank(self, branch: Branch) -> float:
        return 0.0

    def turn(self, branch: Branch) -> float:
        return 0.0


class PrefillFirst(Fcfs):
    prompts_first = True


class DecodeRoundRobin(Fcfs):
    def turn(self, branch: Branch) -> float:
        return float(branch.last_step)


class YoungestGivesWay(Order):
    def victim(self, branch: Branch) -> tuple[float, ...]:
        return (branch.ticket,)


class OldestDecodeGivesWay(Order):
    def victim(self, branch: Branch) -> tuple[float, ...]:
        return (branch.phase == "decode", -branch.ticket)


ORDERS: Final[dict[str, type[Order]]] = {
    "fair": Order,
    "fcfs": Fcfs,
    "prefill_first": PrefillFirst,
    "decode_round_robin": DecodeRoundRobin,
}
VICTIMS: Final[dict[str, type[Order]]] = {
    "least_due": Order,
    "youngest": YoungestGivesWay,
    "oldest_decode": OldestDecodeGivesWay,
}


def make_order(name: str = "fair", victims: str = "least_due") -> Order:
    """The order of that name, with a rule for who gives way."""
    order, rule = ORDERS[name], VICTIMS[victims]
    if rule is Order:
        return order()
    bases = (rule, order) if order is not Order else (rule,)
    made: Order = type(f"{name}_{victims}", bases, {})()
    return made
