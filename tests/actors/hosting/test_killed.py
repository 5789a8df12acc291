"""A worker's disk belongs to its process, as long as that lives."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mallee.protocol.errors import StorageBusy
from mallee.worker.storage.files import Directory
from support import disks
from support.disks import opened

pytestmark = pytest.mark.process

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
    path = os.pathsep.join((str(Path(disks.__file__).parents[1]), os.environ.get("PYTHONPATH", "")))
    command = [sys.executable, "-c", OPENS, str(tmp_path)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path}
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"open\n"
        with pytest.raises(StorageBusy) as caught:
            opened(Directory(tmp_path))
        assert caught.value.fields["holder"] == str(other.pid)
        other.kill()
    opened(Directory(tmp_path)).close()
