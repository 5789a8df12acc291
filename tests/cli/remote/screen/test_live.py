"""`mallee top` at running services of mocked engines, and as a program in a terminal."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import pytest

from mallee.cli.remote.screen.app import Top
from mallee.cli.remote.screen.asking import LiveService
from mallee.cli.remote.screen.sessions import short
from mallee.client import AsyncMallee, Mallee
from support.screens import has, shown

pytestmark = pytest.mark.process


async def test_a_fork_grows_on_the_screen_and_is_pruned_from_it(url: str, client: Mallee) -> None:
    """X12, part: branches, capsules and workers of a real service, live; a subtree ended by a key."""
    app = Top(LiveService(url, api_key=None), interval_s=0.2)
    async with (
        app.run_test(size=(110, 34), notifications=True) as pilot,
        AsyncMallee(url) as asking,
    ):
        await shown(app, pilot, has("w0", "w1", "ready"))
        await pilot.press("2")
        session = asking.session("grown")
        (first,) = await session.complete("a tree of many trunks", max_tokens=4)
        lines = await shown(app, pilot, has(short(str(first.capsule))))
        (line,) = (line for line in lines if short(str(first.capsule)) in line)
        assert "branches" not in line
        forked = (await session.capsule(str(first.capsule))).fork(3, max_tokens=3)
        branches = await forked.wait()
        await shown(app, pilot, has("3 branches", *(short(str(each.capsule)) for each in branches)))
        await pilot.press("down", "p")
        await shown(app, pilot, has("Prune below", "and 3 capsules"))
        await pilot.press("y")
        gone = [f"{short(str(each.capsule))}  12 tokens, gone" for each in branches]
        await shown(app, pilot, has("pruned below", *gone))
        await pilot.press("5")
        await shown(app, pilot, has(short(str(first.request_id)), "went to", "served as"))
        await pilot.press("2", "c")
        await shown(app, pilot, has("Close session grown?"))
        await pilot.press("y")
        await shown(app, pilot, has("closed grown", "no session"))
    assert client.sessions() == []


def test_the_program_draws_in_a_terminal_and_ends_by_a_key(url: str) -> None:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-m", "mallee.cli", "top", "--url", url, "--interval-s", "0.5"],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm-256color"},
    )
    os.close(theirs)
    try:
        _read_until(ours, r"w1.*ready.*ready")
        os.write(ours, b"q")
        _read_until(ours, r"\x1b\[\?1049l")  # leaves the screen as it was
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait(10)
        os.close(ours)


def _read_until(terminal: int, pattern: str) -> None:
    seen = b""
    while not re.search(pattern, seen.decode(errors="replace"), re.DOTALL):
        found = os.read(terminal, 65536)
        assert found, seen[-2000:]
        seen += found
