"""Plans of responses: what is new since the last one is rendered, and drawn after its capsule.

The tokens are those of rendering the whole conversation again, whatever the template does. It is asked with
the messages since the last question of a user alone, up to an *anchor* (the end of an earlier prompt, whose
place among the tokens is known) and beyond: if both texts begin alike, the rest follows the anchor. As far as
the rest begins with the tokens that the model drew, they stay too. Where a template rewrites what came before
an anchor (reasoning that is dropped), the one before is tried; then the whole is rendered.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import numpy as np

from mallee.api.chat.reading import Chat, ChatReader
from mallee.api.grammars import OutputFormat
from mallee.api.jobs import JobMaker, Plan, Start
from mallee.api.prompts import PromptReader, RenderedPrompt
from mallee.api.responses.items import messages_of, read_input, renamed
from mallee.api.responses.requests import chat_request, check, effort_of, output_of
from mallee.api.responses.store import Left, State, Turns
from mallee.api.responses.tools import declared, placed
from mallee.api.text.conversation import Conversation, Message, read_functions
from mallee.api.text.specials import Rendering
from mallee.protocol.api.generate import ChatRequest
from mallee.protocol.api.responses import ResponseRequest
from mallee.protocol.errors import InvalidParameter
from mallee.protocol.hashing import Tokens
from mallee.protocol.ids import Scope
from mallee.protocol.messages import unpack_tokens
from mallee.router.dispatch.jobs import QueueTerms

How: TypeAlias = Literal["new", "capsule", "rewritten", "whole"]
SHOWN_CHARS: Final = 256  # at either end of a long text that is rendered only to be left out again


class PlannedTurn(NamedTuple):
    """One request, ready to start; the last of `turns` is its own.

    `asked`: tokens and turn, as in `Left`; None: this prompt is it.
    """

    plan: Plan
    items: list[dict[str, Any]]
    head: Conversation
    turns: Turns
    how: How
    new_tokens: int
    asked: tuple[int, int] | None


class TurnAsked(NamedTuple):
    """A turn in normal form. `request` is given the prompt's tokens; `is_hint`: as of `ChatReader.begun`."""

    head: Conversation  # instructions, functions and what the template reads
    messages: Sequence[Message]
    output: OutputFormat
    request: Callable[[int], ChatRequest]
    is_hint: bool = False


class _Rest(NamedTuple):
    start: Start
    prompt: RenderedPrompt
    how: How


class TurnMaker:
    """Reads requests for one model. Stateless; safe to use from several threads."""

    def __init__(self, reader: PromptReader, chat: ChatReader, maker: JobMaker) -> None:
        self._reader = reader
        self._chat = chat
        self._maker = maker

    def plan(
        self,
        body: ResponseRequest,
        scope: Scope,
        terms: QueueTerms,
        previous: State | None,
        *,
        has_capsule: bool,
        pending: Sequence[dict[str, Any]] = (),
    ) -> PlannedTurn:
        """The plan of `body` after `previous` and `pending` items.

        `has_capsule`: the capsule of `previous` can be forked.

        Raises BadRequest.
        """
        self._maker.check_model(body.model)
        check(body)
        request, output = chat_request(body), output_of(body)
        items, messages = read_input(body.input)
        if pending:
            messages = messages_of([*pending, *items], "input")
        asked = TurnAsked(self._head(body), messages, output, lambda _: request)
        planned = self.turn(asked, scope, terms, previous, has_capsule=has_capsule)
        how: How = "whole" if pending and planned.how == "new" else planned.how
        return planned._replace(items=items, how=how)

    def turn(
        self,
        asked: TurnAsked,
        scope: Scope,
        terms: QueueTerms,
        previous: State | None,
        *,
        has_capsule: bool,
    ) -> PlannedTurn:
        """The plan of a turn after `previous`, as `plan`."""
        head, messages = asked.head, asked.messages
        turns = (*(() if previous is None else previous.turns), tuple(messages))
        rest = None
        left = previous.left if previous is not None and has_capsule else None
        # Instructions or tools that changed stand at the beginning of it all.
        if previous is not None and left is not None and head == previous.head:
            rest = self._rest(previous, left, messages, scope)
        if rest is not None:
            found, prompt, start = self._conversation(head, messages), rest.prompt, rest.start
            num_tokens, how = start.num_tokens + len(prompt.tokens), rest.how
            question = None if left is None else (left.asked_tokens, left.asked_turn)
            is_question = any(message.role == "user" for message in messages)
            if is_question or (question is not None and question[0] > start.num_tokens):
                question = None
        else:
            found, start, question = self._conversation(head, _joined(turns)), None, None
            prompt = self._reader.conversation(found, scope, add_generation_prompt=True)
            num_tokens, how = len(prompt.tokens), "new" if previous is None else "whole"
        request = asked.request(num_tokens)
        chat = self._chat.begun(request, found, prompt, asked.output, is_hint=asked.is_hint)
        return PlannedTurn(
            plan=self._planned(request, chat, scope, terms, start),
            items=[],
            head=head,
            turns=turns,
            how=how,
            new_tokens=len(prompt.tokens),
            asked=question,
        )

    def _planned(
        self,
        request: ChatRequest,
        chat: Chat,
        scope: Scope,
        terms: QueueTerms,
        start: Start | None,
    ) -> Plan:
        try:
            return self._maker.conversation(request, chat, scope, terms, start)
        except InvalidParameter as error:
            raise renamed(error, "max_completion_tokens", "max_output_tokens") from error

    def _head(self, body: ResponseRequest) -> Conversation:
        """Instructions, functions and what the template reads."""
        system = (Message("system", body.instructions),) if body.instructions else ()
        functions = read_functions(placed(body.tools), declared)
        given = Conversation(system, functions)
        return self._chat.with_variables(
            given, effort_of(body), body.chat_template_kwargs, is_hint=True
        )

    def _conversation(self, head: Conversation, messages: Sequence[Message]) -> Conversation:
        """All of it. Instructions and a system's message that follows them are one message."""
        if head.messages and messages and messages[0].role in ("system", "developer"):
            text = f"{head.messages[0].text}\n\n{messages[0].text}"
            return Conversation(
                (Message("system", text), *messages[1:]), head.functions, head.variables
            )
        return Conversation((*head.messages, *messages), head.functions, head.variables)

    def _rest(
        self, previous: State, left: Left, messages: Sequence[Message], scope: Scope
    ) -> _Rest | None:
        """The tokens after an anchor of `previous`; None: the template rewrites it all."""
        *before, answer = previous.turns
        assert before, "an answer follows a prompt"
        head = _shortened_head(previous.head)
        num_asked = left.asked_turn + 1
        base = [_shortened(each) for each in _since_question(before[:num_asked])]
        between = _joined(before[num_asked:])
        whole = self._rendered(head, [*base, *between, *answer, *messages], generates=True)
        anchors = [(left.prompt_tokens, between)]
        if num_asked < len(before):
            anchors.append((left.asked_tokens, []))
        for num_tokens, more in anchors:
            for generates in (True, False):
                begun = self._rendered(head, [*base, *more], generates=True)
                begin, at = begun, num_tokens
                if not generates:
                    begin = self._rendered(head, [*base, *more], generates=False)
                    if not begun.text.startswith(begin.text):
                        continue
                    at -= len(self._reader.rest(begun, len(begin.text), scope).tokens)
                if not whole.text.startswith(begin.text):
                    continue
                prompt = self._reader.rest(whole, len(begin.text), scope)
                is_last = generates and num_tokens == left.prompt_tokens
                return _after(left, at, prompt, is_last=is_last)
        return None

    def _rendered(
        self, head: Conversation, messages: Sequence[Message], *, generates: bool
    ) -> Rendering:
        found = self._conversation(head, messages)
        return self._reader.rendering(found, add_generation_prompt=generates)


def _joined(turns: Sequence[Sequence[Message]]) -> list[Message]:
    return [message for turn in turns for message in turn]


def _after(left: Left, at: int, prompt: RenderedPrompt, *, is_last: bool) -> _Rest:
    """`prompt` after `at` tokens of a capsule.

    `is_last`: what was drawn begins there, and goes on as far as the prompt begins with it.
    """
    num = _num_alike(unpack_tokens(left.drawn), prompt.tokens) if is_last else 0
    start = Start(left.capsule, at + num, is_cut=at + num < left.num_tokens)
    rest = prompt._replace(tokens=prompt.tokens[num:])
    return _Rest(start, rest, "rewritten" if start.is_cut else "capsule")


def _num_alike(drawn: Tokens, tokens: Tokens) -> int:
    num = min(len(drawn), len(tokens) - 1)
    differ = np.flatnonzero(drawn[:num] != tokens[:num])
    return int(differ[0]) if len(differ) else num


def _since_question(turns: Sequence[Sequence[Message]]) -> list[Message]:
    """The messages from a user's last one on, or all."""
    messages = _joined(turns)
    for i in range(len(messages) - 1, -1, -1):
        if messages[i].role == "user":
            return messages[i:]
    return messages


def _shortened_head(head: Conversation) -> Conversation:
    return replace(head, messages=[_shortened(each) for each in head.messages])


def _shortened(message: Message) -> Message:
    """The same with less of a long text, which no template reads to its middle."""
    if len(message.text) <= 4 * SHOWN_CHARS or message.role == "assistant":
        return message
    return replace(message, text=message.text[:SHOWN_CHARS] + message.text[-SHOWN_CHARS:])
