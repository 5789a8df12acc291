"""As much of LangGraph as programs of ours use, where it is not installed."""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any, NamedTuple, get_type_hints

START, END = "__start__", "__end__"


def stand_in() -> dict[str, ModuleType]:
    """Its modules by name."""
    names = {"StateGraph": StateGraph, "START": START, "END": END, "Send": Send}
    made = {}
    for name in ("langgraph", "langgraph.graph", "langgraph.types"):
        made[name] = ModuleType(name)
        vars(made[name]).update(names)
    return made


class Send(NamedTuple):
    """A node's call with a state of its own."""

    node: str
    state: Mapping[str, Any]


class StateGraph:
    """As much of LangGraph's graph as the example uses: steps of nodes that run at once, and reducers."""

    def __init__(self, schema: type) -> None:
        hints = get_type_hints(schema, include_extras=True)
        self._reducers = {
            name: hint.__metadata__[0]
            for name, hint in hints.items()
            if hasattr(hint, "__metadata__")
        }
        self._nodes: dict[str, Callable[[Any], Mapping[str, Any]]] = {}
        self._edges: dict[str, list[str]] = {}
        self._spreads: dict[str, Callable[[Any], list[Send]]] = {}

    def add_node(self, name: str, run: Callable[[Any], Mapping[str, Any]]) -> None:
        self._nodes[name] = run

    def add_edge(self, begin: str, end: str) -> None:
        self._edges.setdefault(begin, []).append(end)

    def add_conditional_edges(
        self, begin: str, spread: Callable[[Any], list[Send]], ends: list[str]
    ) -> None:
        self._spreads[begin] = spread

    def compile(self) -> "StateGraph":
        return self

    def invoke(self, state: Mapping[str, Any]) -> dict[str, Any]:
        found, todo = dict(state), [Send(each, state) for each in self._edges[START]]
        with ThreadPoolExecutor() as threads:
            while todo:
                done = list(threads.map(lambda each: self._nodes[each.node](each.state), todo))
                for update in done:
                    self._add(found, update)
                names = dict.fromkeys(each.node for each in todo)
                todo = [send for name in names for send in self._next(name, found)]
        return found

    def _add(self, found: dict[str, Any], update: Mapping[str, Any]) -> None:
        for name, value in update.items():
            reduce = self._reducers.get(name)
            found[name] = value if reduce is None else reduce(found[name], value)

    def _next(self, node: str, state: Mapping[str, Any]) -> list[Send]:
        if node in self._spreads:
            return self._spreads[node](state)
        return [Send(each, state) for each in self._edges[node] if each != END]
