# ruff: noqa: RUF001 - DeepSeek's tokens have a wide bar
"""Answers with calls as models of each family write them: hundreds, from a seeded generator.

The shapes are those of the families' model cards and templates: calls after text and before it, several in
a row, nested arguments, escapes, line breaks in texts, other spacing, and calls that are none.
"""

import json
import random
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, NamedTuple

from mallee.api.text.conversation import Function
from mallee.api.text.tools.source import Call

SCHEMA: Final = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "deep": {"type": "object"},
        "tags": {"type": "array"},
        "is_on": {"type": "boolean"},
    },
}
FUNCTIONS: Final = {
    name: Function(name, f"does {name}", SCHEMA) for name in ("get_weather", "search", "run-it")
}
TEXTS: Final = (
    *("", "I'll look that up.", "Sure!\n\nHere we go:", "zwölf Boxkämpfer 🌳 東京", "{not json}"),
    *("a < b and c > d", "use `x[0]`", "1. one\n2. two", "<tool", 'say "it\'s"'),
)
STRINGS: Final = (
    *("Oslo", "", "Malmö 🌳", 'a "quoted" word', "two\nlines", "back\\slash", "</tool", "}}]]"),
    *(
        "tab\there",
        "it's",
        "```",
        "<b>&amp;</b>",
        "\u2028",
        "[1, 2]",
        "def f():\n    return {'a': 1}",
    ),
)


class Recorded(NamedTuple):
    """An answer, its text outside of calls and its calls, apart."""

    raw: str
    text: str
    calls: list[Call]


def arguments(rng: random.Random) -> dict[str, Any]:
    made: dict[str, Any] = {}
    if rng.random() < 0.8:
        made["city"] = rng.choice(STRINGS)
    if rng.random() < 0.5:
        made["days"] = rng.choice([0, -3, 14, 1 << 40])
    if rng.random() < 0.4:
        made["is_on"] = rng.random() < 0.5
    if rng.random() < 0.5:
        made["tags"] = [
            rng.choice([*STRINGS[:4], 1.5, None, True]) for _ in range(rng.randrange(4))
        ]
    if rng.random() < 0.5:
        made["deep"] = {"a": {"b": [{"c": rng.choice(STRINGS[:4])}, {}]}, "é": -0.25}
    return made


def written_json(rng: random.Random, value: Any) -> str:
    """In one of the ways of models."""
    layout = rng.choice([{}, {"separators": (",", ":")}, {"indent": 2}])
    return json.dumps(value, ensure_ascii=rng.random() < 0.3, **layout)


def call_json(rng: random.Random, name: str, given: Any, key: str) -> str:
    if rng.random() < 0.7:
        return f'{{"name": "{name}", "{key}": {written_json(rng, given)}}}'
    return written_json(rng, {"name": name, key: given})


def hermes(rng: random.Random, calls: list[tuple[str, Any]]) -> str:
    space = rng.choice(["\n", "", " "])
    parts = [
        f"<tool_call>{space}{call_json(rng, *call, 'arguments')}{space}</tool_call>"
        for call in calls
    ]
    return rng.choice(["\n", "", "\n\n"]).join(parts)


def tagged_value(rng: random.Random, given: Any) -> str:
    """A text as it is, all else as JSON or in Python's words."""
    if isinstance(given, str):
        return given
    return str(given) if isinstance(given, bool) and rng.random() < 0.5 else json.dumps(given)


def qwen_coder(rng: random.Random, calls: list[tuple[str, Any]]) -> str:
    value = partial(tagged_value, rng)
    parts = []
    for name, given in calls:
        body = "".join(f"<parameter={k}>\n{value(v)}\n</parameter>\n" for k, v in given.items())
        call = f"<function={name}>\n{body}</function>"
        parts.append(f"<tool_call>\n{call}\n</tool_call>" if rng.random() < 0.8 else call)
    return "\n".join(parts)


def glm(rng: random.Random, calls: list[tuple[str, Any]]) -> str:
    gap = rng.choice(["\n", ""])  # 4.5 and 4.6, 4.7 and 5
    parts = []
    for name, given in calls:
        keys = (f"<arg_key>{k}</arg_key>{gap}<arg_value>" for k in given)
        values = (f"{tagged_value(rng, v)}</arg_value>{gap}" for v in given.values())
        body = "".join(map("".join, zip(keys, values, strict=True)))
        parts.append(f"<tool_call>{name}{gap}{body}</tool_call>")
    return gap.join(parts)


def minimax(rng: random.Random, calls: list[tuple[str, Any]]) -> str:
    parts = []
    for name, given in calls:
        body = "".join(
            f'<parameter name="{k}">{tagged_value(rng, v)}</parameter>\n' for k, v in given.items()
        )
        parts.append(f'<invoke name="{name}">\n{body}</invoke>\n')
    return f"<minimax:tool_call>\n{''.join(parts)}</minimax:tool_call>"


def dsml(rng: random.Random, calls: list[tuple[str, Any]]) -> str:
    parts = []
    for name, given in calls:
        lines = []
        for key, value in given.items():
            is_text = rng.choice(["", f' string="{str(isinstance(value, str)).lower()}"'])
            head = f'<｜DSML｜parameter name="{key}"{is_text}>'
            lines.append(f"{head}{tagged_value(rng, value)}</｜DSML｜parameter>\n")
        parts.append(f'<｜DSML｜invoke name="{name}">\n{"".join(lines)}</｜DSML｜invoke>\n')
    return f"<｜DSML｜function_calls>\n{''.join(parts)}</｜DSML｜function_calls>"


def kimi(rng: random.Random, calls: list[tuple[str, Any]]) -> str:
    space = rng.choice(["", "", "\n"])
    parts = []
    for number, (name, given) in enumerate(calls, rng.choice([0, 12])):
        head = f"<|tool_call_begin|>{space}functions.{name}:{number}<|tool_call_argument_begin|>"
        parts.append(f"{head}{space}{written_json(rng, given)}{space}<|tool_call_end|>{space}")
    return f"<|tool_calls_section_begin|>{space}{''.join(parts)}<|tool_calls_section_end|>"


def llama(rng: random.Random, calls: list[tuple[str, Any]]) -> str:
    tag = rng.choice(["", "<|python_tag|>"])
    return tag + rng.choice(["; ", ";", "\n"]).join(
        call_json(rng, *call, rng.choice(["parameters", "arguments"])) for call in calls
    )


def mistral(rng: random.Random, calls: list[tuple[str, Any]]) -> str:
    if rng.random() < 0.5:
        listed = ", ".join(call_json(rng, *call, "arguments") for call in calls)
        return f"[TOOL_CALLS]{rng.choice(['', ' '])}[{listed}]"
    ids = rng.choice(["", "[CALL_ID]abc123def"])
    return "".join(f"[TOOL_CALLS]{n}{ids}[ARGS]{written_json(rng, a)}" for n, a in calls)


def deepseek(rng: random.Random, calls: list[tuple[str, Any]]) -> str:
    is_fenced = rng.random() < 0.5
    parts = []
    for name, given in calls:
        body = written_json(rng, given)
        inner = f"function<｜tool▁sep｜>{name}\n```json\n{body}\n```"
        inner = inner if is_fenced else f"{name}<｜tool▁sep｜>{body}"
        parts.append(f"<｜tool▁call▁begin｜>{inner}<｜tool▁call▁end｜>")
    return f"<｜tool▁calls▁begin｜>{rng.choice(['', chr(10)]).join(parts)}<｜tool▁calls▁end｜>"


def harmony(rng: random.Random, calls: list[tuple[str, Any]]) -> str:
    """The recipient before the channel or behind it, after reasoning and a second message of it or not."""
    parts = []
    for name, given in calls:
        thought = "<|channel|>analysis<|message|>Need {it}.<|end|>"
        parts += [thought, "<|start|>assistant" + thought][: rng.randrange(3)]
        heads = ("assistant{}<|channel|>commentary json", "assistant<|channel|>commentary{}")
        head = rng.choice([*heads, heads[1] + rng.choice(["", " "]) + "<|constrain|>json"])
        head = head.format(f" to=functions.{name}")
        parts.append(f"<|start|>{head}<|message|>{written_json(rng, given)}<|call|>")
    return "".join(parts)


def gemma(rng: random.Random, calls: list[tuple[str, Any]]) -> str:
    def python(name: str, given: Any) -> str:
        return f"{name}({', '.join(f'{k}={v!r}' for k, v in given.items())})"

    is_python = all(name.isidentifier() and "```" not in str(a) for name, a in calls)
    if is_python and rng.random() < 0.3:
        lines = [rng.choice(["{}", "print({})"]).format(python(*call)) for call in calls]
        return "```tool_code\n" + "\n".join(lines) + "\n```"
    return "\n".join(f"```json\n{call_json(rng, *c, 'parameters')}\n```" for c in calls)


WRITERS: Final[Mapping[str, Callable[[random.Random, list[tuple[str, Any]]], str]]] = {
    "hermes": hermes,
    "qwen3_coder": qwen_coder,
    "llama3_json": llama,
    "mistral": mistral,
    "deepseek_v3": deepseek,
    "gemma": gemma,
    "glm45": glm,
    "minimax_m2": minimax,
    "deepseek_v32": dsml,
    "kimi_k2": kimi,
    "harmony": harmony,
}
# Marks with which no plain text of a family may begin, and no string of a call may have.
BROKEN: Final = {
    "hermes": ["<tool_call>{broken", '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>'],
    "qwen3_coder": ["<tool_call>\n<function=unknown>\n</function>", "<function=", "<tool_call>"],
    "llama3_json": ['{"name": "unknown", "parameters": {}}', '{"a": 1}', "<|python_tag|>print(1)"],
    "mistral": ['[TOOL_CALLS][{"name": "unknown", "arguments": {}}]', "[TOOL_CALLS]search[ARGS]x"],
    "deepseek_v3": ["<｜tool▁calls▁begin｜><｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>x"],
    "glm45": ["<tool_call>unknown\n</tool_call>", "<tool_call>x<", "<tool_call>"],
    "minimax_m2": ['<invoke name="unknown">\n</invoke>', "<minimax:tool_call></minimax:tool_call>"],
    "deepseek_v32": ['<｜DSML｜invoke name="unknown">', "<｜DSML｜function_calls>"],
    "kimi_k2": [
        "<|tool_call_begin|>functions.unknown:0<|tool_call_argument_begin|>{}<|tool_call_end|>",
        "<|tool_calls_section_begin|><|tool_call_begin|>x",
    ],
    "harmony": [
        "<|channel|>commentary to=functions.unknown <|constrain|>json<|message|>{}<|call|>",
        "<|start|>assistant<|channel|>commentary to=functions.search <|message|>none<|call|>",
        "<|channel|>fin",
    ],
    "gemma": ['```json\n{"a": 1}\n```', "```json\n[1, 2]\n```", "```tool_code\nimport os\n```"],
}


def recorded(family: str, number: int) -> Recorded:
    """The answer of that number: a call or more after text, or text that only looks like one."""
    rng = random.Random(f"{family}-{number}")
    if number % 5 == 4:
        raw = rng.choice(BROKEN[family])
        before = rng.choice(TEXTS[:4]) if family != "llama3_json" else ""
        return Recorded(before + raw, before + raw, [])
    given = [(rng.choice(list(FUNCTIONS)), arguments(rng)) for _ in range(rng.choice([1, 1, 2, 3]))]
    calls = [Call(name, json.dumps(each, ensure_ascii=False)) for name, each in given]
    raw = WRITERS[family](rng, given)
    before = "" if family == "llama3_json" else rng.choice(TEXTS)
    between = rng.choice(["", "\n", " \n\n"])
    after = rng.choice(["", "", "", "\n", "\nDone.", "  And that's all. "])
    text = before + (after.rstrip() if before.strip() else after.strip())
    return Recorded(before + between + raw + after, text, calls)
