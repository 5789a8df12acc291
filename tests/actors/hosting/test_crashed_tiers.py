"""Workers that are killed while they demote and delete: nothing acknowledged is lost, or comes back."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mallee.protocol.messages import Fork, Limits, Release
from mallee.testing.forward import linear_tokens
from mallee.worker.storage.files import Directory
from mallee.worker.storage.volume import Volume
from support import crashing_engine
from support.crashing_engine import ROOMY, SAMPLED, SPEC, prompt
from support.run_out import run_out

pytestmark = pytest.mark.process

KILLS = 40
TESTS = Path(crashing_engine.__file__).parents[1]


def test_a_kill_while_capsules_go_to_disk_undoes_nothing_that_was_acknowledged(
    tmp_path: Path,
) -> None:
    """F24, part: neither a demotion nor a deletion, by SIGKILL at random system calls.

    Engine, volume and copying threads are a worker's.
    """
    path = os.pathsep.join((str(TESTS), os.environ.get("PYTHONPATH", "")))
    command = [sys.executable, crashing_engine.__file__, str(tmp_path), "0", str(KILLS)]
    subprocess.run(command, check=True, timeout=120, env={**os.environ, "PYTHONPATH": path})
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
