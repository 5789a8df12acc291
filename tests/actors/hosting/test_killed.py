"""Workers' processes that are killed: others go on, nothing acknowledged is lost, nothing leaks."""

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

from mallee.actors.transport.sockets import SocketTransport
from mallee.protocol.ids import Incarnation, WorkerId
from mallee.protocol.messages import Fork, Limits, Release
from mallee.testing.forward import linear_tokens
from mallee.worker.storage.files import Directory
from mallee.worker.storage.volume import Volume
from support import crashing_engine, crashing_loans
from support.crashing_engine import ROOMY, SAMPLED, SPEC, prompt
from support.local_transport import SECRET
from support.run_out import run_out
from support.waiting import until

pytestmark = pytest.mark.process

KILLS, LOAN_KILLS = 40, 20
TESTS = Path(crashing_loans.__file__).parents[1]


def said(script: ModuleType, *arguments: str) -> bytes:
    """The output of a program that kills others."""
    path = os.pathsep.join((str(TESTS), os.environ.get("PYTHONPATH", "")))
    command = [sys.executable, str(script.__file__), *arguments]
    env = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(command, check=True, timeout=120, env=env, stdout=-1).stdout


def test_a_kill_of_a_lender_or_a_borrower_leaves_the_other_whole() -> None:
    """X6, part: SIGKILL at random messages; answers are token-exact, loans, holds, files, threads all end."""
    outcomes = json.loads(said(crashing_loans, "0", str(LOAN_KILLS)))
    assert len(outcomes) == LOAN_KILLS
    # The story is not empty: KV went over, and was cut off.
    assert sum(outcome["moved"] > 0 for outcome in outcomes) > LOAN_KILLS // 2
    assert sum(outcome["failed"] > 0 for outcome in outcomes) > LOAN_KILLS // 2


def test_a_kill_while_capsules_go_to_disk_undoes_nothing_that_was_acknowledged(
    tmp_path: Path,
) -> None:
    """F24, part: neither a demotion nor a deletion, by SIGKILL at random system calls.

    Engine, volume and copying threads are a worker's.
    """
    said(crashing_engine, str(tmp_path), "0", str(KILLS))
    survivors = [survived(tmp_path / str(seed), seed) for seed in range(KILLS)]
    acknowledged, deleted = map(sum, zip(*survivors, strict=True))
    assert acknowledged > KILLS  # the story is not empty
    assert deleted > KILLS // 2


def survived(folder: Path, seed: int) -> tuple[int, int]:
    """Go on with what is in `folder`; the numbers of capsules that must be there, and that must not."""
    must: set[int] = set()
    gone: set[int] = set()
    for verb, number in map(str.split, Path(f"{folder}.said").read_text().splitlines()):
        if verb == "durable":
            must.add(int(number))
        elif verb == "releasing":
            must.discard(int(number))
        elif verb == "deleted":
            gone.add(int(number))
    engine = crashing_engine.engine(folder, 2)
    run_out(engine)
    capsules = engine.snapshot().capsules
    found = {int(each.capsule[1:].partition(".")[0]) for each in capsules}
    assert must <= found
    assert not gone & found, "a deletion was acknowledged, and its capsule is there"
    for number in sorted(found):  # also those whose demotion was not answered any more
        name = f"f{number}"
        fork = Fork(name, f"p{number}.0", (b"",), Limits(4), SAMPLED)
        want = linear_tokens(SPEC, prompt(seed, number), 4, sampling=SAMPLED, seed=7)
        assert run_out(engine, fork).tokens == {name: want}
    run_out(engine, *(Release(f"p{number}.0") for number in found))
    stats = engine.stats()
    assert stats.tiers is not None
    assert (stats.tiers.host_held, stats.tiers.num_failed) == (0, 0)
    assert engine.usage().live_blocks == 0
    engine.close()
    assert not list(folder.rglob("*.tmp"))
    volume = Volume.open(Directory(folder), {"weights": "test"}, 32, ROOMY)
    assert volume.capsules() == []
    volume.check()
    volume.close()
    return len(must), len(gone)


DIES = """
import asyncio, sys
from mallee.actors.transport.server import SocketServer
from support.local_transport import SECRET

class Host:
    def open(self, gateway, sink):
        return self
    def submit(self, raw):
        pass
    def close(self):
        pass

async def serve():
    server = SocketServer(Host(), SECRET)
    await server.listen_unix(sys.argv[1])
    await asyncio.Event().wait()

asyncio.run(serve())
"""


async def test_a_worker_that_is_killed_is_lost_within_milliseconds(tmp_path: Path) -> None:
    path = str(tmp_path / "h.sock")
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", DIES, path, cwd=TESTS)
    lost: list[float] = []
    transport = SocketTransport("g", SECRET)
    transport.link(
        WorkerId("w0"),
        Incarnation(1),
        f"unix:{path}",
        lambda frame: None,
        lambda reason: lost.append(time.monotonic()),
    )
    await until(lambda: transport._hosts[path].is_connected)
    child.kill()
    killed = time.monotonic()
    await until(lambda: bool(lost), 1.0)
    assert lost[0] - killed < 0.5
    await child.wait()
