"""What the router knows and why it decided as it did, as JSON: `GET /v1/router/...`."""

import math
from typing import Any

from mallee.protocol.errors import InvalidParameter, NotFound
from mallee.protocol.ids import RequestId
from mallee.router.placement.decisions import Candidate, Decision
from mallee.router.views import WorkerView

MAX_DECISIONS = 128
MAX_CANDIDATES = 4096


def workers_body(views: tuple[WorkerView, ...]) -> dict[str, Any]:
    """The routable workers. Incarnations are strings: they exceed what JavaScript counts exactly."""
    return {
        "object": "list",
        "data": [
            {**view._asdict(), "object": "worker", "incarnation": str(view.incarnation)}
            for view in views
        ],
    }


def decisions_body(decisions: list[Decision]) -> dict[str, Any]:
    """Decisions with the candidates they came with."""
    return {"object": "list", "data": [_decision(decision) for decision in decisions]}


def unknown_request(request: RequestId) -> NotFound:
    """No decision about `request` is remembered."""
    return NotFound(
        f"request {request!r} is not in the decision log (another gateway's, or too long ago)",
        param="request",
        request=request,
    )


def count(text: str | None, name: str, default: int, most: int) -> int:
    """A query parameter from 1 to `most`. Raises InvalidParameter."""
    if text is None:
        return default
    if not (text.isascii() and text.isdecimal() and 1 <= int(text[:9]) <= most):
        raise InvalidParameter(name, text, f"give a whole number from 1 to {most}")
    return int(text)


def _decision(decision: Decision) -> dict[str, Any]:
    body: dict[str, Any] = {
        "object": "route.decision",
        "number": decision.number,
        "request": decision.request,
        "worker": decision.worker,
        "reason": decision.reason,
        "prompt_tokens": decision.prompt_tokens,
        "num_blocks": decision.num_blocks,
        "rows": decision.rows,
        "num_candidates": decision.num_candidates,
        "candidates": [_candidate(each) for each in decision.candidates],
    }
    if decision.spill is not None:
        body["spill"] = {"how": decision.spill.how, **decision.spill.prices._asdict()}
    return body


def _candidate(candidate: Candidate) -> dict[str, Any]:
    is_eligible = math.isfinite(candidate.total)
    return {
        "worker": candidate.worker,
        "eligible": is_eligible,
        "overlap_blocks": candidate.overlap_blocks,
        **candidate.cost._asdict(),
        "total": candidate.total if is_eligible else None,
    }
