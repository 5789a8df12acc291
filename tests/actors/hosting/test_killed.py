"""Workers' processes that are killed: nothing acknowledged is lost, and another may open what they held."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mallee.protocol.errors import StorageBusy
from mallee.protocol.messages import Fork, Limits, Release
from mallee.testing.forward import linear_tokens
from mallee.worker.storage.files import Directory
from mallee.worker.storage.volume import Volume
from support import crashing_engine
from support.crashing_engine import ROOMY, SAMPLED, SPEC, prompt
from support.disks import opened
from support.run_out import run_out

pytestmark = pytest.mark.process

KILLS = 40
TESTS = Path(crashing_engine.__file__).parents[1]
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": f"{TESTS}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
}


def test_a_kill_while_capsules_go_to_disk_undoes_nothing_that_was_acknowledged(
    tmp_path: Path,
) -> None:
    """F24, part: neither a demotion nor a deletion, by SIGKILL at random system calls.

    Engine, volume and copying threads are a worker's.
    """
    command = [sys.executable, crashing_engine.__file__, str(tmp_path), "0", str(KILLS)]
    subprocess.run(command, check=True, timeout=120, env=ENVIRONMENT)
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


def test_a_live_process_keeps_others_out_and_a_dead_one_does_not(tmp_path: Path) -> None:
    files = Directory(tmp_path)
    volume = opened(files)
    with pytest.raises(StorageBusy, match=f"in use by process {os.getpid()}"):
        opened(Directory(tmp_path))
    script = (
        "import sys, time; from pathlib import Path; from support.disks import opened;"
        "from mallee.worker.storage.files import Directory;"
        "opened(Directory(Path(sys.argv[1]))); print('open', flush=True); time.sleep(60)"
    )
    volume.close()
    command = [sys.executable, "-c", script, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=ENVIRONMENT) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"open\n"
        with pytest.raises(StorageBusy) as caught:
            opened(Directory(tmp_path))
        assert caught.value.fields["holder"] == str(other.pid)
        other.kill()
    opened(Directory(tmp_path)).close()
