"""Contexts that grow, named by blocks: what made-up clients write."""

from dataclasses import dataclass

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
