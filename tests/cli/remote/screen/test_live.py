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
from mallee.client import AsyncMallee
from support.screens import has, shown

pytestmark = pytest.mark.process


async def test_an_answer_is_explained_on_the_screen(url: str) -> None:
    """X12, part: workers and requests of a real service, live."""
    app = Top(LiveService(url, api_key=None), interval_s=0.2)
    async with app.run_test(size=(110, 34)) as pilot, AsyncMallee(url) as client:
        await shown(app, pilot, has("w0", "w1", "ready"))
        answer = await client.complete("a tree of many trunks", max_tokens=4)
        await pilot.press("4")
        await shown(app, pilot, has(str(answer.request_id)[:12], "went to", "served as"))


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
