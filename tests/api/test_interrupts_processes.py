"""Ctrl-C in a program that uses the SDK: whatever it was doing, the server keeps nothing of it."""

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from mallee.client import ConnectionFailed, Mallee

pytestmark = pytest.mark.process

BEGIN = """
import signal, sys
from mallee.client import Mallee

signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it

client = Mallee(sys.argv[1])
def say(text):
    print(text, flush=True)
def wait():
    say("now")
    import time
    time.sleep(60)
"""


@contextmanager
def interrupted(live: Any, program: str) -> Iterator[None]:
    """`program` runs until it says "now" and the block has ended; then comes Ctrl-C."""
    command = [sys.executable, "-c", BEGIN + program, live.url]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "now\n"
        yield
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
        assert process.returncode in (-signal.SIGINT, 1)
        assert errors.rstrip().endswith("KeyboardInterrupt")
    finally:
        process.kill()
        process.communicate()


def test_capsules_and_streams_end_with_the_block_that_has_them(live_in_thread: Any) -> None:
    """K15, part: Ctrl-C pins nothing."""
    live_in_thread.service.holds_after = 2
    kept = set(live_in_thread.service.capsules)
    program = """
with client.prefill("abc", cache_salt="s") as capsule:
    branches = capsule.fork(3)
    next(branches.events())
    say("now")
    for event in branches.events():
        pass
"""
    with interrupted(live_in_thread, program):
        assert len(live_in_thread.service.capsules) == len(kept) + 1
    assert set(live_in_thread.service.capsules) == kept
    assert live_in_thread.service.closed.wait(5)


def test_a_program_that_goes_on_after_an_interrupt_ends_its_stream(live_in_thread: Any) -> None:
    """A stream that is left in its loop's body ends with its block, though the client lives on."""
    live_in_thread.service.holds_after = 2
    program = """
try:
    with client.stream("abc") as branches:
        for event in branches.events():
            wait()
except KeyboardInterrupt:
    say(next(iter([*branches.branches])))
    sys.stdin.read(1)
"""
    command = [sys.executable, "-c", BEGIN + program, live_in_thread.url]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "now\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "0\n"
        assert live_in_thread.service.closed.wait(5)
        assert process.poll() is None
        process.communicate("x", timeout=10)


def test_a_graph_that_is_left_in_its_loop_s_body_ends_with_its_program(live_in_thread: Any) -> None:
    """Also without a block, whose end would have closed it."""
    live_in_thread.service.holds_after = 2
    kept = set(live_in_thread.service.capsules)
    program = """
from mallee.client import Graph
graph = Graph()
graph.branch(graph.prefill("abc"), "d")
for event in client.run(graph):
    if event.type == "node.delta":
        wait()
"""
    with interrupted(live_in_thread, program):
        pass
    assert live_in_thread.service.closed.wait(5)
    assert set(live_in_thread.service.capsules) == kept


def test_a_prefill_that_is_interrupted_leaves_no_capsule(live_in_thread: Any) -> None:
    """The interrupt comes between the request and its answer: the server cancels."""

    async def never(_: Any) -> Any:
        await asyncio.Event().wait()
        yield

    live_in_thread.service.script = never
    kept = set(live_in_thread.service.capsules)
    with interrupted(live_in_thread, "say('now')\nwith client.prefill('abc'): pass"):
        assert live_in_thread.service.started.wait(10)
    assert live_in_thread.service.closed.wait(5)
    assert set(live_in_thread.service.capsules) == kept


@pytest.mark.parametrize("ends", ["close", "fail"])
def test_a_failing_delete_hides_no_error_of_the_block(live_in_thread: Any, ends: str) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise ConnectionFailed("x", "y")

    def work() -> None:
        with Mallee(live_in_thread.url) as client, client.prefill("abc"):
            if ends == "close":
                client.close()
            else:
                client._send = fail  # type: ignore[method-assign]
            raise LookupError("of the block")

    with pytest.raises(LookupError):
        work()


def test_a_program_that_closes_nothing_ends(live_in_thread: Any) -> None:
    program = f"""
from mallee.client import Mallee
client = Mallee({live_in_thread.url!r})
branches = client.stream("abc", n=2)
next(branches.events())
print(client.models())
"""
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False
    )
    assert (ran.returncode, ran.stdout) == (0, "['tiny/bytes']\n"), ran.stderr
