"""Timings as JSON: what `mallee profile` writes, and the fitted profiles that come with the package."""

from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

from mallee.mocker.timing.closed import ClosedForm, Experts, Plane
from mallee.mocker.timing.grid import Decodes, Grid, Prefills
from mallee.mocker.timing.model import Timing, TimingModel
from mallee.protocol.errors import ConfigError


class ClosedData(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="form", tag="closed"
):
    """A `ClosedForm`."""

    prefill_base_s: float
    new_s: float
    pair_s: float
    prefix_s: float
    planes: tuple[tuple[float, float, float], ...]

    def model(self) -> ClosedForm:
        planes = tuple(Plane(*plane) for plane in self.planes)
        return ClosedForm(self.prefill_base_s, self.new_s, self.pair_s, self.prefix_s, planes)


class ExpertsData(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="form", tag="experts"
):
    """An `Experts`."""

    dense: ClosedData
    share: float
    all_prefill_s: float
    all_decode_s: float

    def model(self) -> Experts:
        return Experts(self.dense.model(), self.share, self.all_prefill_s, self.all_decode_s)


class PrefillData(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """As `grid.Prefills`."""

    new: tuple[float, ...]
    prefix: tuple[float, ...]
    seconds: tuple[tuple[float, ...], ...]


class DecodeData(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """As `grid.Decodes`."""

    rows: tuple[float, ...]
    context: tuple[float, ...]
    seconds: tuple[tuple[float, ...], ...]


class GridData(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="form", tag="grid"
):
    """A `Grid`, as it was measured."""

    prefill: PrefillData
    decode: DecodeData

    def model(self) -> Grid:
        prefill, decode = self.prefill, self.decode
        return Grid(
            Prefills(prefill.new, prefill.prefix, prefill.seconds),
            Decodes(decode.rows, decode.context, decode.seconds),
        )


ModelData: TypeAlias = ClosedData | ExpertsData | GridData


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
    model: ModelData

    def timing(self) -> Timing:
        """Raises ConfigError naming a field with a value that can't be."""
        model: TimingModel = self.model.model()
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


def closed_data(form: ClosedForm) -> ClosedData:
    planes = tuple((plane.base_s, plane.row_s, plane.token_s) for plane in form.planes)
    return ClosedData(form.prefill_base_s, form.new_s, form.pair_s, form.prefix_s, planes)


def experts_data(model: Experts) -> ExpertsData:
    return ExpertsData(
        closed_data(model.dense), model.share, model.all_prefill_s, model.all_decode_s
    )
