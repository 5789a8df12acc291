"""The demo's search: one question, by samples and by a beam that draws no more tokens.

Both are one `POST /v1/search` from the same capsule, at the same temperature and seed. An answer's score is
the geometric mean of its tokens' probabilities. Samples are whole answers, of which the best is taken; the
beam draws a few tokens at a time, and goes on where they are likeliest.
"""

import time
from typing import TYPE_CHECKING, Any, Final

from rich.table import Table

from mallee.cli.output import grid

if TYPE_CHECKING:
    from mallee.client import Mallee

SEED: Final = 1
ANSWER_TOKENS: Final = 48
STEP_TOKENS: Final = 4
SAMPLES: Final = {"type": "best_of_n", "n": 8, "max_tokens": ANSWER_TOKENS}
BEAM: Final = {
    **{"type": "beam", "width": 2, "branch": 4, "step_tokens": STEP_TOKENS},
    "depth": ANSWER_TOKENS // STEP_TOKENS,
}


def searched(client: "Mallee", capsule: str) -> dict[str, Any]:
    """Of samples and of the search {"drawn", "prefill_tokens", "score", "total_ms", "text"}.

    Samples may end early: the search's budget is what they have drawn.
    """
    samples = _asked(client, {"capsule": capsule, "policy": SAMPLES})
    budget = {"tokens": samples["drawn"]}
    search = _asked(client, {"capsule": capsule, "policy": BEAM, "budget": budget})
    return {"samples": samples, "search": search}


def _asked(client: "Mallee", body: dict[str, Any]) -> dict[str, Any]:
    begin = time.perf_counter()
    found = client.post("/v1/search", {**body, "seed": SEED})
    return {
        "drawn": found["spent"]["completion_tokens"],
        "prefill_tokens": found["spent"]["prefill_tokens"],
        "score": found["score"],
        "total_ms": round(1000 * (time.perf_counter() - begin), 1),
        "text": found["text"],
    }


def search_table(ways: dict[str, Any]) -> Table:
    numbers = ("tokens\ndrawn", "prompt tokens\ncomputed", "best\nscore", "\nseconds")
    rows = []
    for name, way in ways.items():
        counts = (str(way["drawn"]), str(way["prefill_tokens"]))
        rows.append((name, *counts, f"{way['score']:.3f}", f"{way['total_ms'] / 1000:.1f}"))
    head, title = ("way", *numbers), f"the best answer of {ANSWER_TOKENS} tokens"
    return grid(head, rows, right=numbers, whole=head, title=title, title_justify="left")


def verdict(ways: dict[str, Any]) -> str:
    """The outcome in one line, be it won or lost."""
    samples, search = ways["samples"], ways["search"]
    figures = (
        f"{search['score']:.3f} for {search['drawn']} tokens drawn, the best of the samples"
        f" {samples['score']:.3f} for {samples['drawn']}"
    )
    if search["score"] <= samples["score"]:
        return f"search: it did not win this time: {figures}"
    return f"search: {search['score'] / samples['score']:.1f} times the score: {figures}"
