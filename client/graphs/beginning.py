"""The questions before a graph begins: does it fit, what of its journal holds, what is left of its budget."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Final, TypeAlias

from mallee.client import calls
from mallee.client.graphs.journal import Done, needed, without
from mallee.client.results import read_as
from mallee.client.sessions import bound_session, show_session
from mallee.graphs.context import check_context, pieces
from mallee.graphs.graph import CheckedGraph
from mallee.graphs.nodes import Drawn, Filled, Node, Prefill
from mallee.protocol.api.sessions import BoundSession
from mallee.protocol.errors import (
    BadRequest,
    BudgetSpent,
    GraphContextExceeded,
    InvalidGraph,
    NotFound,
)

MAX_ASKED: Final = 16  # questions at once

Send: TypeAlias = Callable[[calls.Call], Awaitable[Any]]
"""A client's: the decoded answer to a call."""


async def check_window(send: Send, graph: CheckedGraph, salt: str | None) -> None:
    """Raises GraphContextExceeded, and InvalidGraph for messages that the model's template can't have.

    A text has at most as many tokens as bytes: most graphs fit by that, without a question for each text.
    """
    (model,) = (await send(calls.MODELS))["data"]
    nodes = graph.nodes.values()
    counts: dict[tuple[str, bool], int] = {}

    def key(node: Node, piece: Filled) -> tuple[str, bool]:
        return str(piece), isinstance(node, Prefill)

    async def ask(node: Node, piece: Filled) -> None:
        try:
            num = await num_tokens(send, piece, salt, opens=isinstance(node, Prefill))
        except BadRequest as error:
            raise InvalidGraph(f"node {node.name}: {error.message}") from error
        counts[key(node, piece)] = num

    def count(node: Node, piece: Filled) -> int:
        found = counts.get(key(node, piece))
        return len(str(piece).encode()) if found is None else found

    has_places = any(isinstance(node, Drawn) and node.at for node in nodes)
    for is_exact in (has_places, True):
        texts = {key(node, piece): (node, piece) for node in nodes for piece in pieces(node)}
        asked = [texts[k] for k in texts.keys() - counts.keys() if is_exact or texts[k][0].messages]
        await _each(partial(ask, *each) for each in asked)
        try:
            return check_context(graph, count, model["max_model_len"])
        except GraphContextExceeded:
            if is_exact:
                raise
    return None


async def num_tokens(send: Send, text: Filled, salt: str | None, *, opens: bool = False) -> int:
    """Tokens of a text, or of messages; `opens`: which begin a conversation."""
    body: dict[str, Any] = {"add_special_tokens": False, "cache_salt": salt}
    if isinstance(text, str):
        body["prompt"] = text
    else:
        body |= {"messages": text, "add_generation_prompt": not opens}
    return int((await send(calls.Call("POST", "/tokenize", body)))["count"])


async def still_done(
    send: Send, graph: CheckedGraph, done: Mapping[str, Done], salt: str | None
) -> dict[str, Done]:
    """The nodes of a journal, but those whose capsule is needed and gone; others tell no capsule."""
    there: dict[str, bool] = {}  # capsules of nodes

    async def ask(name: str) -> None:
        capsule = done[name].work.capsule
        there[name] = bool(capsule)
        with suppress(NotFound):
            if capsule:
                there[name] = False
                await send(calls.of_capsule("GET", capsule, salt))
                there[name] = True

    left = dict(done)
    while True:
        names = needed(graph, left)
        await _each(partial(ask, name) for name in names if name not in there)
        lost = [name for name in names if not there[name]]
        if not lost:
            break
        left = without(graph, left, lost)
    for name, each in left.items():
        if name not in names:
            each.work.capsule = ""
    return left


async def bind(
    send: Send,
    budget: calls.Budget,
    session: str,
    *,
    parent: str | None,
    done: Mapping[str, Done],
    salt: str | None,
) -> dict[str, float]:
    """Give a graph's session its budget, and return what is left of it.

    What earlier runs have spent stays spent, also where the service has forgotten it. Raises BudgetSpent.
    """
    left: dict[str, Any] = dict(budget)
    known = None
    if done:
        with suppress(NotFound):
            found = read_as(await send(show_session(session, salt)), BoundSession).budget
            known = found if found is not None and found.kept else None
        drawn = [each.work.completion_tokens or 0 for each in done.values() if each.work.finish]
        spent = {"tokens": sum(drawn), "branches": len(drawn)}
        for name in left:
            resource = None if known is None else getattr(known, name)
            left[name] = left[name] - spent.get(name, 0) if resource is None else resource.left
            if left[name] <= 0:
                raise BudgetSpent(name, "earlier runs of the journal have spent it")
    if known is None:
        given: Any = left
        await send(bound_session(session, given, parent, salt))
    return left


async def _each(questions: Iterable[Callable[[], Awaitable[None]]]) -> None:
    """Ask all, some at once. Raises the first error, when nothing is asked any more."""
    turns = asyncio.Semaphore(MAX_ASKED)

    async def ask(question: Callable[[], Awaitable[None]]) -> None:
        async with turns:
            await question()

    asked = await asyncio.gather(*map(ask, questions), return_exceptions=True)
    for error in asked:
        if error is not None:
            raise error
