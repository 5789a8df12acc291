"""Timings as JSON: what `mallee profile` writes, and the fitted profiles that come with the package."""

from pathlib import Path
from typing import Literal

import msgspec

from mallee.mocker.timing.closed import ClosedForm, Experts
from mallee.mocker.timing.grid import Decodes, Grid, Prefills
from mallee.mocker.timing.model import Timing, TimingModel
from mallee.protocol.errors import ConfigError


class GridData(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="form", tag="grid"
):
    """A `Grid`, as it was measured."""

    prefill: Prefills
    decode: Decodes


class TimingFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A timing with the conditions it was measured under. Fields are those of `Timing`."""

    format: Literal["mallee-timing-1"] = "mallee-timing-1"
    conditions: dict[str, str | int | float] = {}
    kv_bytes_per_token: int = 0
    overhead_s: float = 0.0
    request_s: float = 0.0
    jitter: float = 0.0
    startup_s: float = 0.0
    shares_reads: bool = False
    model: ClosedForm | Experts | GridData

    def timing(self) -> Timing:
        """Raises ConfigError naming a field with a value that can't be."""
        model: TimingModel
        match self.model:
            case GridData(prefill, decode):
                model = Grid(prefill, decode)
            case closed:
                model = closed
        return Timing(
            model,
            overhead_s=self.overhead_s,
            request_s=self.request_s,
            jitter=self.jitter,
            startup_s=self.startup_s,
            shares_reads=self.shares_reads,
        )

    def save(self, path: Path) -> None:
        """Write it, once it is known to be readable."""
        self.timing()
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")


def read_timing(path: Path) -> TimingFile:
    """The timing in a file. Raises ConfigError naming the file, the field and what is wrong."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=TimingFile)
        found.timing()
    except OSError as error:
        raise ConfigError(f"{path}: can't be read: {error.strerror}") from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: no timing file: {error}") from error
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.message}") from error
    return found
