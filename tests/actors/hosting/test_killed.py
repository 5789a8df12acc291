"""A worker's disk belongs to its process, as long as that lives, and outlives it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mallee.protocol.errors import StorageBusy
from mallee.worker.storage.files import Directory
from support import disks
from support.disks import check, opened, read

pytestmark = pytest.mark.process

PATHS = (str(Path(disks.__file__).parents[1]), os.environ.get("PYTHONPATH", ""))
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(PATHS)}
OPENS = """
import sys, time
from pathlib import Path
from support.disks import opened
from mallee.worker.storage.files import Directory
opened(Directory(Path(sys.argv[1])))
print("open", flush=True)
time.sleep(60)
"""


def test_a_live_process_keeps_others_out_and_a_dead_one_does_not(tmp_path: Path) -> None:
    command = [sys.executable, "-c", OPENS, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=ENVIRONMENT) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"open\n"
        with pytest.raises(StorageBusy) as caught:
            opened(Directory(tmp_path))
        assert caught.value.fields["holder"] == str(other.pid)
        other.kill()
    opened(Directory(tmp_path)).close()


KILLED = """
import os, signal, sys
from pathlib import Path
from support.disks import BLOCK, opened, rows
from mallee.worker.storage.files import Directory
from mallee.worker.storage.volume import VolumeConfig

def story(folder, last):
    folder.mkdir()
    told = open(folder / "told", "a", buffering=1)
    num_calls = 0

    def called(frame, event, function):  # of what is no Python: the system, SQLite
        nonlocal num_calls
        num_calls += event == "c_call"
        if num_calls == last:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.setprofile(called)
    volume = opened(Directory(folder), VolumeConfig(12 * BLOCK))
    for number in range(6):
        volume.put([number, number + 1], rows([number, number + 1]))
        volume.commit(str(number), b"tokens", [number, number + 1])
        told.write(f"{number} there\\n")
        if number % 2:
            told.write(f"{number - 1} going\\n")
            volume.drop(str(number - 1))
            told.write(f"{number - 1} gone\\n")
    sys.setprofile(None)
    volume.close()
    return num_calls

folder = Path(sys.argv[1])
num_calls = story(folder / "whole", -1)
for nth in range(60):
    if os.fork():
        os.wait()
    else:
        story(folder / str(nth), num_calls * (nth + 1) // 60)
"""


def test_a_kill_at_any_of_60_points_undoes_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    """F24, part: in a process that is really killed, before a call of the system or of SQLite."""
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=True, env=ENVIRONMENT)
    seen = set()
    for nth in range(60):
        folder = tmp_path / str(nth)
        known = dict(line.split() for line in (folder / "told").read_text().splitlines())
        volume = opened(Directory(folder))
        found = set(volume.capsules())
        assert {name for name, state in known.items() if state == "there"} <= found
        assert not {name for name, state in known.items() if state == "gone"} & found
        for name in found:
            assert volume.load(name) is not None
            assert read(volume, [int(name), int(name) + 1]) == (2, None)
        assert volume.unreadable() == []
        check(volume)
        volume.close()
        seen.add(len(known))
    assert len(seen) > 4, "it was killed early and late"
