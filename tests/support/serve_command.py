"""The commands that serve (`mallee serve`, `mallee mock`), as a user starts them: processes of their own."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import psutil
import yaml

from mallee.runtime.addresses import free_port
from mallee.runtime.bus.children import death_follower
from support.folders import short_folder

READY: Final = "(Ctrl-C ends)"
STOP_S: Final = 120.0  # a guard: it drains first
SURROUNDINGS: Final = {
    "COLUMNS": "1000",  # no line is broken
    "RAY_raylet_start_wait_time_s": "40",  # then Ray is started again
}


class ServeCommand:
    """A command that serves at `url`, until the block ends. What it says is in `said`, line by line."""

    def __init__(self, *arguments: str, environment: Mapping[str, str] | None = None) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.said: list[str] = []
        self._arguments = (*arguments, "--port", str(self.port))
        self._environment = environment or {}
        self._has_begun = threading.Event()
        self._reader = threading.Thread(target=self._read)

    def __enter__(self) -> "ServeCommand":
        """Returns once it says that it serves. Fails if it ends instead."""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "mallee.cli", *self._arguments],
            env={**os.environ, **SURROUNDINGS, **self._environment},
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=death_follower(),  # in a process group of its own, as by a shell
        )
        self._reader.start()
        try:
            self._has_begun.wait()
            assert any(READY in line for line in self.said), self.said
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """End it by that signal; its exit status. Idempotent."""
        assert self.process.stderr is not None
        self.process.send_signal(number)
        try:
            self.process.wait(STOP_S)
        finally:
            self.process.kill()
            self._reader.join()
            self.process.stderr.close()
        return self.process.returncode

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said.append(line)
            if READY in line:
                self._has_begun.set()
        self._has_begun.set()

    def family(self, part: str = "") -> list[psutil.Process]:
        """Its processes, those of Ray too, with `part` in their command line."""
        found = []
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                if part in " ".join(process.cmdline()):
                    found.append(process)
        return found


@contextmanager
def serving(settings: Mapping[str, Any]) -> Iterator[ServeCommand]:
    """`mallee serve` with these settings."""
    with short_folder() as folder:
        file = Path(folder) / "settings.yaml"
        file.write_text(yaml.safe_dump(dict(settings)))
        with ServeCommand("serve", "--config", str(file)) as made:
            yield made
