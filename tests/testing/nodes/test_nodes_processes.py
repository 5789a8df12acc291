"""Folders and processes of a `mallee up` that was killed."""

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from mallee.testing.nodes.folders import Folder, clear_abandoned

pytestmark = pytest.mark.process


def test_folders_without_their_owners_are_removed_and_others_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the processes of such an owner, which has its folder locked; a new one is not locked yet."""
    monkeypatch.setattr("tempfile.tempdir", "/tmp")  # paths of sockets are short
    mine = Folder()
    secret = Path(mine.secret("key", "k"))
    abandoned, young = (Path(tempfile.mkdtemp(prefix="mup-", dir="/tmp")) for _ in range(2))
    (abandoned / "owner").touch()
    program = [sys.executable, "-c", "import time; time.sleep(60)", f"{abandoned}/1/orders.json"]
    left = subprocess.Popen(program)
    try:
        told = [each for each in clear_abandoned() if str(abandoned) in each]
        said = f"removed {abandoned} of a `mallee up` that was killed"
        assert told == [f"{said}, and ended 1 processes of it"]
        left.wait(5)
        assert not abandoned.exists()
        assert young.is_dir()
        assert mine.made("a/b").is_dir()
        assert (secret.read_text(), secret.stat().st_mode & 0o777) == ("k", 0o600)
    finally:
        left.kill()
        left.wait()
        mine.remove()
        young.rmdir()
    assert not mine.path.exists()
