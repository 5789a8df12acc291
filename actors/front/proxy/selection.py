"""Decisions alone: the backend of a request that its client sends itself.

`POST /v1/router/select` with the request's body answers where it should go. With a `request_id` in it, it
is booked there until `POST /v1/router/release` names it, or for `booking_s`. The path of the request itself
may follow: `/v1/router/select/v1/responses`.
"""

from typing import Final

import msgspec

from mallee.actors.front.http.messages import Page, plain_answer
from mallee.actors.front.placement import Picked, Refusal
from mallee.actors.front.prompts import Prompt
from mallee.actors.front.proxy.exchange import Exchange
from mallee.protocol.ids import RequestId

SELECT: Final = b"/v1/router/select"
RELEASE: Final = b"/v1/router/release"
MAX_ID: Final = 256  # characters


class Named(msgspec.Struct):
    """The part of a body that names its booking."""

    request_id: str | None = None
    cached_tokens: int | None = None


class Chosen(msgspec.Struct):
    """The answer."""

    worker: str
    reason: str
    overlap_tokens: int  # of the prompt, which are known there
    prompt_tokens: int
    request_id: str | None


def named(raw: bytes) -> Named | None:
    """None of a body that is no JSON, or names its booking wrongly."""
    try:
        found = msgspec.json.decode(raw, type=Named)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    is_sound = found.request_id is None or 0 < len(found.request_id) <= MAX_ID
    return found if is_sound else None


def booking(request_id: str) -> RequestId:
    """The name of the booking of a client's id."""
    return RequestId(f"select-{request_id}")


class Selection(Exchange):
    """One decision. With a name its booking stays."""

    _request_id: str | None = None

    def begin(self) -> None:
        found = named(self.request.body)
        if found is None:
            self._refuse(Refusal(400, "bad_request", "give a JSON object; request_id is a text"))
            return
        self._request_id = found.request_id
        super().begin()

    def _placed(self, prompt: Prompt, began: float) -> None:
        if self._request_id is not None:
            # Only now, for another may have taken the name while the prompt was read.
            name = booking(self._request_id)
            if self._relay.front.router.is_booked(name):
                message = f"request_id {self._request_id!r} is booked: release it, or give another"
                self._refuse(Refusal(400, "bad_request", message))
                return
            self.id = name
        super()._placed(prompt, began)

    @property
    def _path(self) -> str:
        return super()._path.removeprefix(SELECT.decode())

    def _picked(self, prompt: Prompt, picked: Picked) -> None:
        chosen = Chosen(
            worker=picked.endpoints[0],
            reason=picked.reason,
            overlap_tokens=picked.overlap_blocks * self._relay.front.router.config.block_size,
            prompt_tokens=prompt.num_tokens,
            request_id=self._request_id,
        )
        page = Page(200, msgspec.json.encode(chosen))
        self.client.write(plain_answer(page, closes=not self._keeps, is_head=False))
        self.status, self._stays_booked = 200, self._request_id is not None
        self._end("answered")
        self.client.finished(keeps=self._keeps)
