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
import os, sys
from pathlib import Path
from signal import SIGKILL
import sqlite3
from support.disks import opened, rows
from mallee.worker.storage.files import Directory
from mallee.worker.storage.volume import VolumeConfig

class Connection(sqlite3.Connection):
    def execute(self, *given):
        point()
        return super().execute(*given)

def point():
    global left
    left -= 1
    if not left:
        os.kill(os.getpid(), SIGKILL)

def patched(name):
    real = getattr(os, name)
    def call(*given, **more):
        point()
        return real(*given, **more)
    setattr(os, name, call)

connect = sqlite3.connect
sqlite3.connect = lambda *given, **more: connect(*given, factory=Connection, **more)
for name in ("pwrite", "fdatasync", "fsync"):
    patched(name)
for nth in range(60):
    folder = Path(sys.argv[1], str(nth))
    folder.mkdir()
    if os.fork():
        os.wait()
        continue
    left = 31 + 9 * nth
    told = open(folder / "told", "a", buffering=1)
    volume = opened(Directory(folder), VolumeConfig(12 * 64))
    for number in range(6):
        volume.put([number, number + 1], rows([number, number + 1]))
        volume.commit(str(number), b"tokens", [number, number + 1])
        told.write(f"{number} there\\n")
        if number % 2:
            told.write(f"{number - 1} going\\n")
            volume.drop(str(number - 1))
            told.write(f"{number - 1} gone\\n")
    os._exit(0)
"""


def test_a_kill_at_any_of_60_points_undoes_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    """F24, part: before a system call or a statement, in a process that is really killed."""
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
