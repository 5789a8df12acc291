"""README and docs: links resolve, paths and commands in them exist, the README keeps its size."""

import re
import shlex
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from mallee.api import errors as http_errors
from mallee.cli.main import cli
from mallee.protocol.errors import MalleeError, type_of
from mallee.runtime.config import AppConfig, sections

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
MADE = {"build", "dist"}  # by commands: not there at first
FOLDERS = {p.name for p in ROOT.iterdir() if p.is_dir() and not p.name.startswith(".")} - MADE

COMMANDS = sorted(typer.main.get_command(cli).commands)  # type: ignore[attr-defined]
SECTIONS = {name: set(section.model_fields) for name, section in sections().items()}

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"`([^`\n]+)`")
FENCE = re.compile(r"^```(?:sh)?\n(.*?)^```", re.MULTILINE | re.DOTALL)
# `docker run ... IMAGE mallee serve ...`, but not `helm install mallee ...`.
INSIDE = re.compile(rf"^\w.* mallee ((?:{'|'.join(COMMANDS)}) .*)$")
# A line of a page that is as well run as read.
CHEAP = (
    "version",
    "settings",
    "check serve.yaml",
    "settings --nats-permissions default",
    "profile --fits",
)
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """Names of the page's headings in links, as GitHub makes them."""
    names = (re.sub(r"[^\w\- ]", "", h.lower()) for h in HEADING.findall(page.read_text()))
    return {name.strip().replace(" ", "-") for name in names}


def commands(text: str) -> Iterator[list[str]]:
    """Words of each `mallee ...` in fences, and in code that names options."""
    fences = [fence.replace("\\\n", " ") for fence in FENCE.findall(text)]
    lines = [line for fence in fences for line in fence.splitlines()]
    lines += [code for code in CODE.findall(text) if code.startswith("mallee ")]
    lines += [line.strip() for line in text.splitlines() if line.startswith("    mallee ")]
    for line in lines:
        line = re.split(r"  +#|   +|\s\|\s", line.removeprefix("$ "))[0]
        if re.match(r"(\w+=\S+ )*(\.venv/bin/)?mallee ", line):
            words = shlex.split(line, comments=True)
            yield words[next(i for i, word in enumerate(words) if word.endswith("mallee")) + 1 :]
        elif found := INSIDE.search(line):
            yield shlex.split(found[1], comments=True)


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


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES[:1] + PAGES[2:], ids=lambda p: str(p.relative_to(ROOT)))
def test_commands_in_the_docs_are_commands_of_mallee(page: Path) -> None:
    for words in commands(page.read_text()):
        assert problem(words) is None, words


def settings(text: str) -> Iterator[tuple[str, str]]:
    """Section ("" for none) and name of each setting in code, as `routing.policy`, and in commands."""
    for code in CODE.findall(text):
        found = re.match(r"([a-z]+)\.(\w+)(?:[:=. ]|$)", code)
        if found and found[1] in SECTIONS and code not in FILES:
            yield found[1], found[2]
    for words in commands(text):
        for word in (after for option, after in pairwise(words) if option == "--set"):
            section, _, name = word.partition("=")[0].rpartition(".")
            yield section.partition(".")[0], name


# Fields of the API, and files, that look like settings.
FILES = {"engine.py", "mock.md", "http.py"}


@pytest.mark.parametrize("page", PAGES[:1] + PAGES[2:], ids=lambda p: str(p.relative_to(ROOT)))
def test_settings_in_the_docs_are_settings_of_mallee(page: Path) -> None:
    for section, name in settings(page.read_text()):
        known = SECTIONS[section] if section else set(AppConfig.model_fields)
        assert name in known, f"{section}.{name}"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Ray's own, at its import
def test_commands_that_are_cheap_run_as_they_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    written = {" ".join(words) for page in PAGES[2:] for words in commands(page.read_text())}
    for line in CHEAP:
        assert line in written, line
        answer = CliRunner().invoke(cli, line.split())
        assert answer.exit_code == 0, (line, answer.output)


def test_errors_in_the_table_of_troubles_are_codes_of_the_api() -> None:
    """And with the status that they have."""
    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    of_http = {
        each.code: each
        for each in vars(http_errors).values()
        if isinstance(each, type) and issubclass(each, MalleeError)
    }
    rows = re.findall(r"^\| (\d{3}) (`.*?`) \|", text, re.MULTILINE)
    assert len(rows) > 10
    for status, codes in rows:
        for code in CODE.findall(codes):
            kind = type_of(code) or of_http.get(code)
            assert kind is not None, code
            assert str(kind.status) == status, code


def test_every_page_is_in_the_index() -> None:
    """The API's pages are in the index of their own."""
    indexes = [(ROOT / "docs" / name).read_text() for name in ("index.md", "api.md")]
    linked = {(ROOT / "docs" / link).resolve() for text in indexes for link in LINK.findall(text)}
    assert {page for page in PAGES[2:] if page.name != "index.md"} <= linked


def test_the_readme_is_short_and_names_its_limits() -> None:
    """S17: the README has the heading."""
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 120
    assert "\n## Honest limits\n" in text
