"""Ctrl-C in a program that uses the SDK: whatever it was doing, the server keeps nothing of it."""

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from mallee.client import Mallee
from support.waiting import wait_until

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


def test_a_capsule_of_a_block_is_deleted(live: Any) -> None:
    """K15, part: Ctrl-C pins nothing."""
    kept = set(live.service.capsules)
    with interrupted(live, "with client.prefill('abc', cache_salt='s') as capsule: wait()"):
        assert len(live.service.capsules) == len(kept) + 1
    assert set(live.service.capsules) == kept


def test_streams_end_with_the_block_that_reads_them(live: Any) -> None:
    live.service.holds_after = 2
    kept = set(live.service.capsules)
    program = """
with client.prefill("abc") as capsule:
    branches = capsule.fork(3)
    next(iter(branches))
    say("now")
    for event in branches:
        pass
"""
    with interrupted(live, program):
        pass
    assert set(live.service.capsules) == kept
    assert live.service.closed.wait(5)


def test_a_program_that_goes_on_after_an_interrupt_ends_its_stream(live: Any) -> None:
    """A stream that is left in its loop's body ends with its block, though the client lives on."""
    live.service.holds_after = 2
    program = """
try:
    with client.stream("abc") as branches:
        for event in branches:
            wait()
except KeyboardInterrupt:
    say(next(iter([*branches.branches])))
    sys.stdin.read(1)
"""
    command = [sys.executable, "-c", BEGIN + program, live.url]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "now\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "0\n"
        assert live.service.closed.wait(5)
        assert process.poll() is None
        process.communicate("x", timeout=10)


def test_a_prefill_that_is_interrupted_leaves_no_capsule(live: Any) -> None:
    """The interrupt comes between the request and its answer: the server cancels."""

    async def never(_: Any) -> Any:
        await asyncio.Event().wait()
        yield

    live.service.script = never
    kept = set(live.service.capsules)
    with interrupted(live, "say('now')\nwith client.prefill('abc'): pass"):
        assert live.service.started.wait(10)
    assert live.service.closed.wait(5)
    assert set(live.service.capsules) == kept


@pytest.mark.parametrize("ends", ["close", "fail"])
def test_a_failing_delete_hides_no_error_of_the_block(live: Any, ends: str) -> None:
    program = """
import mallee.client.sync
def fail(*_, **__):
    raise mallee.client.ConnectionFailed("x", "y")
try:
    with client.prefill("abc"):
        if sys.argv[2] == "close":
            client.close()
        else:
            client._send = fail
        raise LookupError("of the block")
except LookupError:
    say("seen")
"""
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + program, live.url, ends],
        capture_output=True, text=True, timeout=30, check=True,
    )  # fmt: skip
    assert done.stdout == "seen\n"


def test_closing_the_client_ends_its_streams(live: Any) -> None:
    live.service.holds_after = 2
    client = Mallee(live.url)
    branches = client.stream("abc", n=2)
    next(iter(branches))
    client.close()
    wait_until(live.service.closed.is_set, timeout_s=5)


def test_what_has_a_salt_is_used_with_it(live: Any) -> None:
    """Forks of a capsule and of an answer, reading, deleting: all in the scope that made it."""
    with Mallee(live.url) as client:
        with client.prefill("abc", cache_salt="s") as capsule:
            scope = live.service.job.scope
            capsule.fork(1).wait()
            assert live.service.job.scope == scope
            client.capsule(capsule.id, cache_salt="s")
            assert live.service.asked_scope == scope
            client.capsule(capsule.id)
            assert live.service.asked_scope != scope
        assert live.service.asked_scope == scope
        (branch,) = client.stream("abc", cache_salt="t").wait()
        scope = live.service.job.scope
        live.service.capsules[branch.capsule] = live.service.capsules["req_x.0"]
        branch.fork(1).wait()
        assert live.service.job.scope == scope
