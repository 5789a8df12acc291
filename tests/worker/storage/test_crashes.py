"""Processes that are killed: nothing acknowledged is lost, and another may open what they held."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mallee.protocol.errors import StorageBusy
from mallee.worker.storage.files import Directory
from mallee.worker.storage.volume import Volume
from support import crashing
from support.disks import opened

pytestmark = pytest.mark.process

KILLS = 60
TESTS = Path(crashing.__file__).parents[1]


def test_a_kill_at_any_call_loses_no_acknowledged_capsule_and_leaves_nothing(
    tmp_path: Path,
) -> None:
    """F24, part: SIGKILL at random system calls of puts, commits, replacements, drops and evictions."""
    command = [sys.executable, crashing.__file__, str(tmp_path), "0", str(KILLS)]
    subprocess.run(command, check=True, timeout=120)
    acknowledged = sum(survived(tmp_path / str(seed)) for seed in range(KILLS))
    assert acknowledged > KILLS  # the story is not empty


def survived(folder: Path) -> int:
    """Hold what is in the folder against what its process was told; capsules that must be there."""
    must: dict[str, list[str]] = {}
    may: dict[str, list[str] | None] = {}  # under way when it was killed
    removing = 0  # records that it took away itself since
    for verb, *rest in map(str.split, Path(f"{folder}.said").read_text().splitlines()):
        if verb == "removing":
            removing += "/capsules/" in rest[0]
            continue
        capsule = rest.pop(0)
        may.clear()
        removing = 0
        match verb:
            case "committed":
                must[capsule] = rest
            case "committing":
                may[capsule] = rest
            case "dropping":
                may[capsule] = None
            case "dropped" | "lost":
                must.pop(capsule, None)
    volume = Volume.open(Directory(folder), crashing.IDENTITY, crashing.BLOCK, crashing.ROOMY)
    volume.check()
    assert not list(folder.rglob("*.tmp"))
    found = set(volume.capsules())
    missing = must.keys() - found - {capsule for capsule, rest in may.items() if rest is None}
    assert len(missing) <= removing, f"{missing} were acknowledged"
    assert not may.keys() & missing, "a record that was to be replaced is gone before the new one"
    assert not missing or int(folder.name) % 2 == 0, "a roomy volume evicts nothing"
    for capsule in found:
        record = volume.load(capsule)
        assert record is not None
        into = [bytearray(crashing.BLOCK) for _ in record.keys]
        assert volume.get(record.keys, into) == (len(into), None)
        assert [bytes(each) for each in into] == [crashing.row(key) for key in record.keys]
        told = [must.get(capsule), may.get(capsule)]
        version = int(record.payload.split()[1])
        assert record.payload == crashing.payload(capsule, version)
        assert [str(version), *map(str, record.keys)] in told
    volume.close()
    return len(must)


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
    environment = {
        **os.environ,
        "PYTHONPATH": f"{TESTS}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    }
    command = [sys.executable, "-c", script, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"open\n"
        with pytest.raises(StorageBusy) as caught:
            opened(Directory(tmp_path))
        assert caught.value.fields["holder"] == str(other.pid)
        other.kill()
    opened(Directory(tmp_path)).close()
