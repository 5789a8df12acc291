"""Messages to text, with the checkpoint's own chat template, as transformers renders it."""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NoReturn, Self

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mallee.actors.text.tokenizer import read_json, special_token
from mallee.protocol.errors import MAX_SHOWN, InvalidParameter, UnsupportedModel

# Two ways to begin the conversation that a continuation is measured against.
_OPENINGS: tuple[list[dict[str, str]], ...] = (
    [{"role": "system", "content": "placeholder"}],
    [{"role": "user", "content": "placeholder"}, {"role": "assistant", "content": "placeholder"}],
)
_KNOWN_KEYS = {"role", "content", "name"}
MAX_MESSAGES: Final = 4096  # templates may look at each message for each


class ChatTemplate:
    """The chat template of one checkpoint, or its absence: then every rendering is refused."""

    __slots__ = ("_now", "_template", "_variables")

    def __init__(
        self,
        source: str | None,
        *,
        bos_token: str | None = None,
        eos_token: str | None = None,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """Raises UnsupportedModel: the template does not compile."""
        self._now = now
        self._variables = {"bos_token": bos_token or "", "eos_token": eos_token or ""}
        self._template: jinja2.Template | None = None
        if source is not None:
            try:
                self._template = self._environment().from_string(source)
            except jinja2.TemplateError as error:
                raise UnsupportedModel(f"the chat template does not compile: {error}") from error

    @classmethod
    def load(cls, path: Path, *, now: Callable[[], datetime] = datetime.now) -> Self:
        """The template in a Hugging Face directory: chat_template.jinja, else tokenizer_config.json.

        Raises UnsupportedModel: it can't be read or does not compile.
        """
        config = read_json(path / "tokenizer_config.json")
        file = path / "chat_template.jinja"
        source = file.read_text(encoding="utf-8") if file.is_file() else _configured(config)
        bos, eos = (special_token(config, key) for key in ("bos_token", "eos_token"))
        return cls(source, bos_token=bos, eos_token=eos, now=now)

    def render(self, messages: Any, add_generation_prompt: bool = True) -> str:
        """The conversation as text. Raises InvalidParameter: no template, or it refuses messages."""
        return self._render(checked(messages), messages, add_generation_prompt)

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
        return self._render(messages, messages, add_generation_prompt, variables)

    def render_continuation(self, messages: Any) -> str:
        """The text that `messages` add after an earlier conversation, generation prompt included.

        Raises InvalidParameter: no template, one that refuses them, or one that rewrites what
        came before, so that there is no such text.
        """
        added = checked(messages)
        refusal: InvalidParameter | None = None
        for opening in _OPENINGS:
            try:
                before = self._render(opening, messages, False)
                after = self._render([*opening, *added], messages, True)
            except InvalidParameter as error:
                refusal = refusal or error
                continue
            if after.startswith(before):
                return after[len(before) :]
            refusal = InvalidParameter(
                "messages",
                messages,
                "this model's chat template rewrites earlier messages when more follow;"
                " send the suffix as text or token ids",
            )
        assert refusal is not None
        raise refusal

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        shown: Any,
        add_prompt: bool,
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        if self._template is None:
            raise InvalidParameter(
                "messages", shown, "this model has no chat template; use /v1/completions"
            )
        try:
            own = {"messages": messages, "add_generation_prompt": add_prompt, **self._variables}
            return self._template.render({**variables, **own})
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
            raise InvalidParameter(
                "messages",
                shown,
                f"the model's chat template refuses them: {str(error)[:MAX_SHOWN]}",
            ) from error

    def _environment(self) -> ImmutableSandboxedEnvironment:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: self._now().strftime(form)
        return environment


def checked(messages: Any) -> list[dict[str, str]]:
    """Messages of the API with plain text as content; text parts are joined by newlines.

    Raises InvalidParameter naming the message's index.
    """
    if not isinstance(messages, list) or not messages:
        raise InvalidParameter("messages", messages, "give a list of at least one message")
    if (num := len(messages)) > MAX_MESSAGES:
        raise InvalidParameter("messages", num, f"give at most {MAX_MESSAGES} messages")
    return [_checked_one(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _checked_one(message: Any, param: str) -> dict[str, str]:
    if not isinstance(message, dict):
        raise InvalidParameter(param, message, 'a message is {"role": ..., "content": ...}')
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidParameter(f"{param}.role", role, "give a role such as user")
    given = {key for key, value in message.items() if value is not None}
    if extra := sorted(map(str, given - _KNOWN_KEYS)):
        raise InvalidParameter(param, extra, "only role, content and name are supported")
    clean = {"role": role, "content": _text(message.get("content"), f"{param}.content")}
    name = message.get("name")
    if name is not None:
        if not isinstance(name, str):
            raise InvalidParameter(f"{param}.name", name, "a name is a string")
        clean["name"] = name
    return clean


def _text(content: Any, param: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidParameter(param, content, "give a string or a list of text parts")
    texts: list[str] = []
    for i, part in enumerate(content):
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        if not isinstance(text, str):
            raise InvalidParameter(
                f"{param}[{i}]", part, 'only parts {"type": "text", "text": ...} are supported'
            )
        texts.append(text)
    return "\n".join(texts)


def _configured(config: dict[str, Any]) -> str | None:
    """`chat_template` of a tokenizer_config.json: a string, or a list of named ones."""
    value = config.get("chat_template")
    if isinstance(value, list):
        named = {t.get("name"): t.get("template") for t in value if isinstance(t, dict)}
        value = named.get("default")
    return value if isinstance(value, str) else None


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **more: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **more)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
