"""The replays of a sweep in a file, as they end: an interrupted sweep goes on where it was."""

import json
import pickle
from pathlib import Path

import numpy as np
import xxhash

from mallee.mocker.replay.config import ReplayConfig
from mallee.mocker.sweeps.pool import Run
from mallee.mocker.timing import load_timing
from mallee.protocol.errors import ConfigError


class Trials:
    """Runs by their configs, a JSON line each. `origin` says all else that a result depends on."""

    def __init__(self, path: Path, origin: str) -> None:
        """Raises ConfigError if the file can't be read or written."""
        self._path, self._origin = path, origin
        self._known: dict[str, Run] = {}
        self.num_found = 0
        try:
            path.touch()
            lines = path.read_text(encoding="utf-8").split("\n")
            if lines.pop():  # the sweep was killed while it wrote: that replay is done again
                path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
            for line in lines:
                key, (summary, conditions, ttft_ms) = json.loads(line)
                self._known[key] = Run(summary, conditions, np.array(ttft_ms))
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(
                f"{path}: no trials of a sweep ({error}); remove it, or give another --out"
            ) from error

    def find(self, config: ReplayConfig) -> Run | None:
        """The run of an earlier sweep with that config and seed."""
        run = self._known.get(self._key(config))
        self.num_found += run is not None
        return run

    def add(self, config: ReplayConfig, run: Run) -> None:
        """Append a run. Raises ConfigError if the disk doesn't take it."""
        line = json.dumps([self._key(config), [*run[:2], run.ttft_ms.tolist()]])
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        except OSError as error:
            raise ConfigError(f"{self._path}: can't be written ({error.strerror})") from error

    def _key(self, config: ReplayConfig) -> str:
        prices = None if config.prices is None else load_timing(config.prices)
        # The timings whole: a file's content may have changed.
        whole = self._origin, config, config.load_timing(), prices
        return xxhash.xxh3_128_hexdigest(pickle.dumps(whole))
