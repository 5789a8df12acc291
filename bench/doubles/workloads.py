"""Made-up workloads: fan-outs, trees of agents, sessions. The same seed makes the same requests."""

import random
from collections.abc import Iterable, Iterator, Sequence

from mallee.traces.workload import NO_PARENT, Request, Workload


def made(
    requests: Iterable[Request], *, name: str, id_tokens: int, kind: str = "made", note: str = ""
) -> Workload:
    """A workload of these requests."""
    kept = list(requests)
    has_forks = any(request.parent != NO_PARENT for request in kept)
    return Workload(name, id_tokens, lambda: iter(kept), kind, note, has_forks)


def siblings(
    groups: int,
    width: int,
    *,
    prefix_tokens: int,
    suffix_tokens: int = 64,
    output_tokens: int = 32,
    gap_s: float = 1.0,
    id_tokens: int = 16,
) -> Workload:
    """`groups` times, `width` independent requests at one instant whose prompts begin alike, cold."""
    prefix_ids, suffix_ids = -(-prefix_tokens // id_tokens), -(-suffix_tokens // id_tokens)
    prefix_tokens = prefix_ids * id_tokens
    requests: list[Request] = []
    next_id = 0
    for group in range(groups):
        prefix = range(next_id, next_id + prefix_ids)
        next_id += prefix_ids
        for _ in range(width):
            own = range(next_id, next_id + suffix_ids)
            next_id += suffix_ids
            requests.append(
                Request(
                    len(requests),
                    group * gap_s,
                    [*prefix, *own],
                    prefix_tokens + suffix_tokens,
                    output_tokens,
                    session=f"s{group}",
                )
            )
    return made(requests, name=f"siblings {groups}x{width}", id_tokens=id_tokens)


def forks(
    trees: int,
    width: int,
    *,
    prefix_tokens: int,
    suffix_tokens: int = 16,
    output_tokens: int = 32,
    levels: int = 1,
    gap_s: float = 0.01,
    id_tokens: int = 16,
    seed: int = 0,
) -> Workload:
    """`trees` roots, one every `gap_s` on average (Poisson); each is forked into `width` branches.

    Each branch adds a text of its own. With more `levels`, the end of a fork's first branch is forked
    again. A root is one prefill, a level one request: width x levels branches a tree.
    """
    root_ids = -(-prefix_tokens // id_tokens)

    def read() -> Iterator[Request]:
        draw = random.Random(seed)  # workloads
        number, now = 0, 0.0
        for tree in range(trees):
            now += draw.expovariate(1.0 / gap_s) if gap_s else 0.0
            ids, session = range(tree * root_ids, (tree + 1) * root_ids), f"t{tree}"
            yield Request(
                number, now, ids, prefix_tokens, 0, session=session, cls="root", num_children=1
            )
            for level in range(levels):
                yield Request(
                    number + 1,
                    now,
                    (),
                    suffix_tokens,
                    output_tokens,
                    session=session,
                    cls=f"level {level + 1}",
                    branches=width,
                    parent=number,
                    num_children=int(level + 1 < levels),
                )
                number += 1
            number += 1

    name = f"forks {trees}x{width}" + (f"x{levels}" if levels > 1 else "")
    return Workload(name, id_tokens, read, "made", f"seed {seed}", has_forks=True)


def agents(
    num: int,
    turns: int,
    *,
    document_tokens: int,
    turn_tokens: int = 256,
    output_tokens: int = 64,
    id_tokens: int = 16,
) -> Workload:
    """`num` agents fork one document and take `turns`, each on the end of the one before."""
    document = range(-(-document_tokens // id_tokens))
    root = Request(0, 0.0, document, document_tokens, 0, cls="document", num_children=num)
    requests = [root]
    for turn in range(turns):
        for agent in range(num):
            number = len(requests)
            requests.append(
                Request(
                    number,
                    0.0,
                    (),
                    turn_tokens,
                    output_tokens,
                    session=f"a{agent}",
                    cls="turn",
                    parent=number - num if turn else 0,
                    num_children=int(turn + 1 < turns),
                )
            )
    return made(requests, name=f"agents {num}x{turns}", id_tokens=id_tokens)


def sessions(
    num: int,
    turns: int,
    *,
    system_tokens: int = 1024,
    turn_tokens: int = 256,
    output_tokens: int = 64,
    think_s: float = 2.0,
    gap_s: float = 0.5,
    id_tokens: int = 16,
    groups: int = 4,
    seed: int = 0,
) -> Workload:
    """`num` clients that talk in `turns`, each of which repeats what was said before and adds to it.

    Sessions begin `gap_s` apart on average; one of `groups` system prompts comes first.
    """
    draw = random.Random(seed)  # workloads
    system_ids = -(-system_tokens // id_tokens)
    turn_ids = -(-(turn_tokens + output_tokens) // id_tokens)
    next_id = groups * system_ids
    requests: list[Request] = []
    starts: list[float] = []
    now = 0.0
    for _ in range(num):
        now += draw.expovariate(1.0 / gap_s)
        starts.append(now)
    for turn in range(turns):
        for client, start in enumerate(starts):
            first = draw.randrange(groups) * system_ids if not turn else 0
            ids: Sequence[int] = range(first, first + system_ids)
            wait_for: tuple[int, ...] = ()
            if turn:
                before = requests[-num]
                ids, wait_for = before.ids, (before.number,)
            ids = [*ids, *range(next_id, next_id + turn_ids)]
            next_id += turn_ids
            requests.append(
                Request(
                    len(requests),
                    start,
                    ids,
                    len(ids) * id_tokens - output_tokens,
                    output_tokens,
                    session=f"c{client}",
                    cls="first" if not turn else "turn",
                    wait_for=wait_for,
                    tool_wait_s=draw.expovariate(1.0 / think_s) if turn else 0.0,
                )
            )
    return made(requests, name=f"sessions {num}x{turns}", id_tokens=id_tokens, note=f"seed {seed}")


def turns_in_any_order(
    num: int,
    turns: int,
    *,
    shared_ids: int,
    turn_ids: int,
    gap_s: float,
    output_tokens: int = 8,
    id_tokens: int = 64,
    by_turns: bool = False,
    seed: int = 0,
) -> Workload:
    """`num` sessions over one beginning of `shared_ids`, whose turns come in any order, by a clock.

    `by_turns`: all sessions' first turns, then all second ones, exactly `gap_s` apart; else `gap_s` is a
    mean. Few are under way at once where the gaps are long: what counts is whose memory they meet.
    """
    draw = random.Random(seed)  # workloads
    order = list(range(num)) * turns
    if not by_turns:
        draw.shuffle(order)
    texts = [list(range(shared_ids)) for _ in range(num)]
    next_id, now = shared_ids, 0.0
    requests: list[Request] = []
    for client in order:
        texts[client] += range(next_id, next_id + turn_ids)
        next_id += turn_ids
        ids = list(texts[client])
        requests.append(
            Request(
                len(requests),
                now,
                ids,
                len(ids) * id_tokens,
                output_tokens,
                session=f"c{client}",
                cls="turn",
            )
        )
        now += gap_s if by_turns else draw.expovariate(1.0 / gap_s)
    return made(requests, name=f"turns {num}x{turns}", id_tokens=id_tokens, note=f"seed {seed}")
