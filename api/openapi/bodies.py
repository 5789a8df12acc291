"""Bodies of answers as types: for the document alone, the code that answers writes them itself."""

from typing import Literal

from mallee.protocol.api.shared import Body
from mallee.search.results import NodeResult


class SpentBody(Body, frozen=True, kw_only=True):
    """Tokens that were computed for a search, in its tree or not, and the requests that it made."""

    prefill_tokens: int
    completion_tokens: int
    requests: int


class Search(Body, frozen=True, kw_only=True):
    """The tree of a search. `principal`: numbers of nodes from the root to the selected one."""

    object: Literal["search"]
    created: int
    model: str
    seed: int
    text: str
    score: float | None
    reason: Literal["done", "found", "tokens", "nodes", "expansions"]
    principal: list[int]
    tokens: int
    expansions: int
    blocks: int
    spent: SpentBody
    nodes: list[NodeResult]
