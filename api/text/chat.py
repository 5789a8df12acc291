"""Conversations to text: with the checkpoint's own chat template as transformers renders it, or one of ours.

A checkpoint whose template shows no tools gets its family's for conversations that have some.
"""

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NoReturn, Self

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from mallee.api.text.conversation import Conversation, Function, Message, ToolCall
from mallee.api.text.families import FAMILIES, FOLDER, Family, family_of
from mallee.api.text.resumable import Mark, Rendered, ResumableTemplate, Trace
from mallee.api.text.specials import Rendering, SpecialTokens
from mallee.api.text.tokenizer import read_json, special_token
from mallee.protocol.errors import MAX_SHOWN, ConfigError, InvalidParameter, UnsupportedModel

# Two ways to begin the conversation that a continuation is measured against.
_OPENINGS: Final = (
    (Message("system", "placeholder"),),
    (Message("user", "placeholder"), Message("assistant", "placeholder")),
)
# A template shows tools if all three words come out.
_SHOWN: Final = ("probed_function", "probed_argument", "probed_result")
_PROBE: Final = Conversation(
    (
        Message("user", "question"),
        Message(
            "assistant",
            tool_calls=(ToolCall("probe1234", _SHOWN[0], json.dumps({"a": _SHOWN[1]})),),
        ),
        Message("tool", _SHOWN[2], tool_call_id="probe1234", name=_SHOWN[0]),
    ),
    (Function(_SHOWN[0], "probe", {"type": "object", "properties": {"a": {"type": "string"}}}),),
)
_OWN_VARIABLES: Final = frozenset(
    ("messages", "tools", "add_generation_prompt", "bos_token", "eos_token", "documents")
)
_REFUSALS: Final = (
    *(jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError),
    *(AttributeError, RecursionError),
)
_OF_DICTS: Final = frozenset(dir(dict))
_PLAIN: Final = (str, int, bool, dict)  # values that have nothing to be protected from
_TESTS_NONE: Final = re.compile(r"""content['"]?\]?\s+is\s+(not\s+)?none""", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Source:
    """A template, compiled, and what its text tells about it."""

    text: str
    template: jinja2.Template
    variables: frozenset[str]  # that clients may set
    tests_none: bool  # an assistant's message without text has the content none
    resumable: ResumableTemplate | None

    def message(self, message: Message) -> dict[str, Any]:
        """A message as transformers passes it to templates: arguments are objects."""
        role = message.role
        if role == "developer" and "developer" not in self.text:
            role = "system"
        shown: dict[str, Any] = {"role": role, "content": message.text}
        if message.reasoning:
            shown["reasoning_content"] = message.reasoning
            if "message.thinking" in self.text:
                shown["thinking"] = message.reasoning
                # gpt-oss' takes one of the two beside a call.
                if message.tool_calls and message.text:
                    shown |= {"thinking": f"{message.reasoning}\n\n{message.text}", "content": ""}
        if message.tool_calls:
            if not message.text and self.tests_none:
                shown["content"] = None
            shown["tool_calls"] = [_call(call) for call in message.tool_calls]
        if message.tool_call_id:
            shown["tool_call_id"] = message.tool_call_id
        if message.name:
            shown["name"] = message.name
        return shown


class ChatTemplate:
    """The chat template of one checkpoint, or its absence: then every rendering is refused."""

    __slots__ = ("_absence", "_environment", "_special", "_tokens", "family", "for_tools", "main")

    def __init__(
        self,
        source: str | None,
        *,
        tool_source: str | None = None,
        family: Family | None = None,
        absence: str = "this model has no chat template; use /v1/completions",
        bos_token: str | None = None,
        eos_token: str | None = None,
        special_tokens: Collection[str] = (),
        added_tokens: Collection[str] = (),
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """`tool_source` is for conversations with tools; `absence` tells why there is no template.

        `special_tokens`, and those of `added_tokens` that a template writes, are no such tokens in texts
        of clients. Raises UnsupportedModel: a template does not compile.
        """
        self._environment = _environment(now)
        self._tokens = {"bos_token": bos_token or "", "eos_token": eos_token or ""}
        self._absence = absence
        ours = self._compiled(family.template) if family is not None else None
        given = self._compiled(source)
        self.main = given or ours
        candidates = (self._compiled(tool_source), given, ours)
        self.for_tools = next(
            (each for each in candidates if each and self._shows_tools(each)), None
        )
        # Only where one of its templates is used.
        self.family = family if ours and ours in (self.main, self.for_tools) else None
        self._special = SpecialTokens({*special_tokens, *self.written(added_tokens)})

    @classmethod
    def load(
        cls,
        path: Path,
        *,
        file: Path | None = None,
        special_tokens: Collection[str] = (),
        added_tokens: Collection[str] = (),
        protects: bool = True,
        now: Callable[[], datetime] = datetime.now,
    ) -> Self:
        """The template in `file`, else of a Hugging Face directory: chat_template.jinja or
        tokenizer_config.json, else its family's.

        `special_tokens` and `added_tokens` are the tokenizer's; with `protects` the former, and those of
        the latter that a template writes, are none in texts of clients.
        Raises UnsupportedModel: a template can't be read or does not compile; ConfigError: no `file`.
        """
        config = read_json(path / "tokenizer_config.json")
        source, tool_source = _configured(config)
        source = _text_of(path / "chat_template.jinja") or source
        tool_source = _text_of(path / "additional_chat_templates" / "tool_use.jinja") or tool_source
        if file is not None:
            source, tool_source = _text_of(file), None
            if source is None:
                raise ConfigError(f"chat.template={str(file)!r}: there is no such file")
        model_type = str(read_json(path / "config.json").get("model_type", ""))
        known = ", ".join(each.name for each in FAMILIES)
        bos, eos = (special_token(config, key) for key in ("bos_token", "eos_token"))
        return cls(
            source,
            tool_source=tool_source,
            family=family_of(model_type, special_tokens),
            absence=f"this model (model_type {model_type!r}) has no chat template and is of no family"
            f" that has one here ({known}): put a chat_template.jinja beside its tokenizer.json, name a"
            f" file as the setting chat.template, or add its family to api/text/{FOLDER.name};"
            " /v1/completions needs none",
            bos_token=bos,
            eos_token=eos,
            special_tokens=special_tokens if protects else (),
            added_tokens=added_tokens if protects else (),
            now=now,
        )

    def render(
        self,
        conversation: Conversation,
        *,
        add_generation_prompt: bool = True,
        max_tokens: int | None = None,
    ) -> Rendering:
        """The conversation as text.

        Raises InvalidParameter: no template, or it refuses messages; ContextLengthExceeded: clients' texts
        have more special tokens than `max_tokens`.
        """
        source = self.source_for(conversation)

        def render(given: Conversation) -> str:
            return self._render(source, given, add_generation_prompt)

        return self._special.render(conversation, render, max_tokens=max_tokens)

    def render_on(
        self,
        source: Source,
        messages: list[dict[str, Any]],
        variables: Mapping[str, Any],
        *,
        add_generation_prompt: bool,
        known: Trace | None,
        marks: Sequence[Mark],
        num_same: int,
    ) -> Rendered | None:
        """The end of a rendering of hidden texts of clients: see `ResumableTemplate`.

        `messages` and the tools in `variables` are as `source` shows them. None: the template refuses
        them, or can't go on.
        """
        if source.resumable is None:
            return None
        given = self._given(messages, add_generation_prompt, variables)
        try:
            return source.resumable.render(given, known=known, marks=marks, num_same=num_same)
        except _REFUSALS:
            return None

    def hidden(self, conversation: Conversation) -> Conversation | None:
        """The conversation with marks instead of special tokens in clients' texts: see `SpecialTokens`."""
        return self._special.hidden(conversation)

    def pieces(self, text: str) -> tuple[str, ...]:
        """A text of hidden ones, in pieces whose tokens, one after the other, are the prompt's."""
        return self._special.pieces(text)

    def written(self, tokens: Collection[str]) -> set[str]:
        """Those of `tokens` that a template writes, as such or made of a role; but no white space."""
        texts = []
        for source in (self.main, self.for_tools):
            texts += [] if source is None else [source.text, *self._probed(source)]
        return {t for t in tokens if not t.isspace() and any(t in text for text in texts)}

    def plain(self, text: str) -> Rendering:
        """A client's text as it is, without special tokens if clients may write none."""
        said = Conversation((Message("assistant", text),))
        return self._special.render(said, lambda given: given.messages[0].text)

    def render_unchecked(
        self,
        messages: list[dict[str, Any]],
        variables: Mapping[str, Any],
        *,
        add_generation_prompt: bool,
    ) -> str:
        """A conversation that another server takes: with tools, tool calls and what else its template reads.

        Raises as `render`.
        """
        source = (self.for_tools if variables.get("tools") else None) or self.main
        if source is None:
            raise InvalidParameter("messages", len(messages), self._absence)
        return self._filled(source, messages, add_generation_prompt, variables)

    def render_continuation(
        self, messages: Sequence[Message], *, max_tokens: int | None = None
    ) -> Rendering:
        """The text that `messages` add after an earlier conversation, generation prompt included.

        Raises as `render`, and InvalidParameter: a template that rewrites what came before, so that
        there is no such text.
        """
        refusal: InvalidParameter | None = None
        source = self.source_for(Conversation(messages))
        for opening in _OPENINGS:
            try:
                before = self._render(source, Conversation(opening), False)
                after = self._special.render(
                    Conversation((*opening, *messages)),
                    lambda given: self._render(source, given, True),
                    max_tokens=max_tokens,
                )
            except InvalidParameter as error:
                refusal = refusal or error
                continue
            if after.pieces[0].startswith(before):
                return Rendering((after.pieces[0][len(before) :], *after.pieces[1:]))
            refusal = InvalidParameter(
                "messages",
                [message.role for message in messages],
                "this model's chat template rewrites earlier messages when more follow;"
                " send the suffix as text or token ids",
            )
        assert refusal is not None
        raise refusal

    def source_for(self, conversation: Conversation) -> Source:
        """The template that renders `conversation`. Raises InvalidParameter: there is none."""
        if self.main is None:
            raise InvalidParameter("messages", len(conversation.messages), self._absence)
        has_tools = conversation.functions or any(
            message.tool_calls or message.role == "tool" for message in conversation.messages
        )
        if not has_tools:
            return self.main
        if self.for_tools is None:
            raise InvalidParameter(
                "tools",
                len(conversation.functions),
                "this model's chat template shows no tools: give it one that does, as the setting"
                " chat.template",
            )
        return self.for_tools

    def _probed(self, source: Source) -> list[str]:
        found = []
        for probe in (*map(Conversation, _OPENINGS), _PROBE):
            try:
                found.append(self._render(source, probe, True))
            except InvalidParameter:  # many refuse some role
                continue
        return found

    def _shows_tools(self, source: Source) -> bool:
        try:
            text = self._render(source, _PROBE, True)
        except InvalidParameter:
            return False
        return all(word in text for word in _SHOWN)

    def _render(self, source: Source, conversation: Conversation, add_prompt: bool) -> str:
        messages = [source.message(each) for each in conversation.messages]
        variables = {**conversation.variables, "tools": shown_functions(source, conversation)}
        return self._filled(source, messages, add_prompt, variables)

    def _filled(
        self,
        source: Source,
        messages: list[dict[str, Any]],
        add_prompt: bool,
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        try:
            return source.template.render(self._given(messages, add_prompt, variables))
        except _REFUSALS as error:
            raise InvalidParameter(
                "messages",
                [message.get("role") for message in messages],
                f"the model's chat template refuses them: {str(error)[:MAX_SHOWN]}",
            ) from error

    def _given(
        self, messages: list[dict[str, Any]], add_prompt: bool, variables: Mapping[str, Any]
    ) -> dict[str, Any]:
        own = {"messages": messages, "add_generation_prompt": add_prompt, **self._tokens}
        return {**variables, **own}

    def _compiled(self, text: str | None) -> Source | None:
        if text is None:
            return None
        try:
            read = meta.find_undeclared_variables(self._environment.parse(text))
            template = self._environment.from_string(text)
        except jinja2.TemplateError as error:
            raise UnsupportedModel(f"the chat template does not compile: {error}") from error
        read -= set(self._environment.globals)
        tests_none = _TESTS_NONE.search(text) is not None
        variables = frozenset(read - _OWN_VARIABLES)
        resumable = ResumableTemplate.of(self._environment, text)
        return Source(text, template, variables, tests_none, resumable)


def _call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": json.loads(call.arguments)}
    return {"id": call.id, "type": "function", "function": function}


def shown_functions(source: Source, conversation: Conversation) -> list[dict[str, Any]] | None:
    """The functions as `source` gets them; None without any."""
    is_described = "+ tool.description" in source.text  # by gpt-oss', also where there is none
    return [_function(each, is_described) for each in conversation.functions] or None


def _function(function: Function, is_described: bool) -> dict[str, Any]:
    shown: dict[str, Any] = {"name": function.name}
    if function.description or is_described:
        shown["description"] = function.description
    shown["parameters"] = function.parameters or {"type": "object", "properties": {}}
    return {"type": "function", "function": shown}


def _text_of(file: Path) -> str | None:
    return file.read_text(encoding="utf-8") if file.is_file() else None


def _configured(config: dict[str, Any]) -> tuple[str | None, str | None]:
    """`chat_template` of a tokenizer_config.json: a string, or a list of named ones; and that for tools."""
    value = config.get("chat_template")
    named: dict[Any, Any] = {"default": value}
    if isinstance(value, list):
        named = {t.get("name"): t.get("template") for t in value if isinstance(t, dict)}
    found = (named.get(name) for name in ("default", "tool_use"))
    default, for_tools = (text if isinstance(text, str) else None for text in found)
    return default, for_tools


class _Generation(Extension):
    """{% generation %} marks the assistant's part for training; here it is its content alone."""

    tags = {"generation"}  # noqa: RUF012 - an instance variable of the base

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    """Reads keys of dicts and plain values of loops and namespaces on a short way, with the same results."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        kind = type(obj)
        if kind is dict:
            if attribute in obj and attribute not in _OF_DICTS:
                return obj[attribute]
        elif (kind is LoopContext or kind is Namespace) and attribute[0] != "_":
            value = getattr(obj, attribute, None)
            if type(value) in _PLAIN:
                return value
        return super().getattr(obj, attribute)


def _environment(now: Callable[[], datetime]) -> ImmutableSandboxedEnvironment:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: now().strftime(form)
    return environment


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **more: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **more)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
