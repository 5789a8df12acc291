"""The text that a textual app shows, and the wait for it."""

import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from typing import Any

from textual.app import App
from textual.pilot import Pilot

_CELL = 12.2  # rich's width of a character in its pictures


def screen_text(app: App[Any]) -> list[str]:
    """The screen's lines, without styles and blanks at their ends, out of its exported picture."""
    picture = ET.fromstring(app.export_screenshot(simplify=True))  # our own
    lines: dict[float, dict[int, str]] = {}
    for text in picture.iter("{http://www.w3.org/2000/svg}text"):
        if re.search(r"-line-\d+\)", text.get("clip-path", "")):
            line = lines.setdefault(float(text.get("y", 0)), {})
            line[round(float(text.get("x", 0)) / _CELL)] = (text.text or "").replace("\xa0", " ")
    return [_joined(lines[at]) for at in sorted(lines)]


def _joined(parts: dict[int, str]) -> str:
    found = ""
    for at in sorted(parts):
        found = found.ljust(at) + parts[at]
    return found.rstrip()


async def shown(app: App[Any], pilot: Pilot[None], claim: Callable[[list[str]], bool]) -> list[str]:
    """The screen's lines, once `claim` holds of them."""
    lines: list[str] = []
    for _ in range(200):
        await pilot.pause(0.05)
        lines = screen_text(app)
        if claim(lines):
            return lines
    raise AssertionError("\n".join(lines))


def has(*words: str) -> Callable[[list[str]], bool]:
    return lambda lines: all(any(word in line for line in lines) for word in words)
