"""README and docs: links resolve, paths and commands in them exist, the README keeps its size."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from mallee.cli.main import cli

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
FOLDERS = {p.name for p in ROOT.iterdir() if p.is_dir() and not p.name.startswith(".")}

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"`([^`\n]+)`")
FENCE = re.compile(r"^```(?:sh)?\n(.*?)^```", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """Names of the page's headings in links, as GitHub makes them."""
    names = (re.sub(r"[^\w\- ]", "", h.lower()) for h in HEADING.findall(page.read_text()))
    return {name.strip().replace(" ", "-") for name in names}


def commands(text: str) -> Iterator[list[str]]:
    """Words of each `mallee ...` in fences, and in code that names options."""
    lines = [line for fence in FENCE.findall(text) for line in fence.splitlines()]
    lines += [code for code in CODE.findall(text) if code.startswith("mallee ")]
    lines += [line.strip() for line in text.splitlines() if line.startswith("    mallee ")]
    for line in lines:
        line = re.split(r"  +#|   +|\s\|\s", line.removeprefix("$ "))[0]
        if re.match(r"(\w+=\S+ )*(\.venv/bin/)?mallee ", line):
            words = shlex.split(line, comments=True)
            yield words[next(i for i, word in enumerate(words) if word.endswith("mallee")) + 1 :]


def problem(words: list[str]) -> str | None:
    """The first word that the command line does not know."""
    command: Any = typer.main.get_command(cli)
    while hasattr(command, "commands") and words and not words[0].startswith("-"):
        if words[0] not in command.commands:
            return words[0]
        command, words = command.commands[words[0]], words[1:]
    known = {opt for p in command.params for opt in (*p.opts, *p.secondary_opts)} | {"--help"}
    used = (word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word))
    return next((word for word in used if word not in known), None)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_relative_links_resolve(page: Path) -> None:
    for link in LINK.findall(page.read_text()):
        if link.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES[:1] + PAGES[2:], ids=lambda p: str(p.relative_to(ROOT)))
def test_paths_in_code_exist(page: Path) -> None:
    """Code such as `router/index/` or `mocker/replay/result.py` names a file or folder."""
    for code in CODE.findall(page.read_text()):
        if not re.fullmatch(r"[\w./\-]+", code) or code.split("/")[0] not in FOLDERS:
            continue
        if "/" in code:
            assert (ROOT / code).exists(), code


@pytest.mark.parametrize("page", PAGES[:1] + PAGES[2:], ids=lambda p: str(p.relative_to(ROOT)))
def test_commands_in_the_docs_are_commands_of_mallee(page: Path) -> None:
    for words in commands(page.read_text()):
        assert problem(words) is None, words


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    linked = {(ROOT / "docs" / link).resolve() for link in LINK.findall(index)}
    assert {page for page in PAGES[2:] if page.name != "index.md"} <= linked


def test_the_readme_is_short_and_names_its_limits() -> None:
    """S17: the README has the heading."""
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 150
    assert "\n## Honest limits\n" in text
