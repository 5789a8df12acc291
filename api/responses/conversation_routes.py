"""The routes of the Conversations API."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from mallee.api.entry.asking import Asking
from mallee.api.entry.pages import read_paging
from mallee.api.responses.conversations import Conversations, Talk, check_room
from mallee.api.responses.items import page, read_input
from mallee.api.serve import json_response
from mallee.api.sse import unless_gone
from mallee.protocol.api.responses import (
    MAX_NEW_ITEMS,
    ConversationDeleted,
    ConversationList,
    ConversationRequest,
    ConversationUpdate,
    ItemsRequest,
)
from mallee.protocol.errors import BadRequest, InvalidParameter, NotFound
from mallee.protocol.ids import Scope


class UnknownItem(NotFound):
    code = "item_not_found"


class ConversationHandlers:
    """The handlers. A cache salt comes by its header alone."""

    def __init__(self, asking: Asking, conversations: Conversations) -> None:
        self._asking = asking
        self._conversations = conversations

    async def create(self, request: Request) -> Response:
        body = await self._asking.read_plain(request, ConversationRequest)
        items = [] if body.items in (None, []) else _read_items(body.items)
        scope = self._asking.scope(request)
        return json_response(await self._conversations.create(scope, items, body.metadata or {}))

    async def list(self, request: Request) -> Response:
        paging = read_paging(request.query_params)
        finding = self._conversations.page(self._asking.scope(request), paging)
        found = await unless_gone(request.receive, finding)
        return json_response(paging.page(ConversationList, found))

    async def get(self, request: Request) -> Response:
        return json_response(await self._conversations.head(*self._named(request)))

    async def update(self, request: Request) -> Response:
        body = await self._asking.read_plain(request, ConversationUpdate)
        if body.metadata is None:
            raise BadRequest("metadata is required", param="metadata")
        changing = self._conversations.set_metadata(*self._named(request), body.metadata)
        return json_response(await changing)

    async def delete(self, request: Request) -> Response:
        name, scope = self._named(request)
        await self._conversations.head(name, scope)
        await self._conversations.forget(name, scope)
        return json_response(ConversationDeleted(id=name))

    async def list_items(self, request: Request) -> Response:
        talk = await self._conversations.talk(*self._named(request))
        return json_response(page(talk.items, request.query_params))

    async def add_items(self, request: Request) -> Response:
        body = await self._asking.read_plain(request, ItemsRequest)
        items = _read_items(body.items)
        name, scope = self._named(request)
        made = self._conversations.with_ids(scope, items)

        def change(talk: Talk) -> Talk:
            check_room(talk, len(made), "items")
            return talk.with_items(made)

        await self._conversations.change(name, scope, change)
        return json_response(page(made, {"order": "asc", "limit": str(MAX_NEW_ITEMS)}))

    async def get_item(self, request: Request) -> Response:
        talk = await self._conversations.talk(*self._named(request))
        return json_response(_item(talk, request))

    async def delete_item(self, request: Request) -> Response:
        name, scope = self._named(request)

        def change(talk: Talk) -> Talk:
            return talk.without(_item(talk, request)["id"])

        await self._conversations.change(name, scope, change)
        return json_response(await self._conversations.head(name, scope))

    def _named(self, request: Request) -> tuple[str, Scope]:
        return request.path_params["conversation"], self._asking.scope(request)


def _read_items(value: Any) -> list[dict[str, Any]]:
    if isinstance(value, str):
        raise InvalidParameter("items", value, "give a list of items")
    items, _ = read_input(value, "items")
    if len(items) > MAX_NEW_ITEMS:
        raise InvalidParameter("items", len(items), f"give at most {MAX_NEW_ITEMS} at once")
    return items


def _item(talk: Talk, request: Request) -> dict[str, Any]:
    name: str = request.path_params["item"]
    for item in talk.items:
        if item["id"] == name:
            return item
    conversation = request.path_params["conversation"]
    raise UnknownItem(f"item {name[:80]!r} is not in conversation {conversation}; list its items")
