"""Timings by name, as users give them.

`h200-llama-3.1-8b-fp8` is a device with what an engine adds, as measured of vLLM; a name of an engine
after an @ says which one, and `@kernels` is the device alone. `dynamo` is Dynamo's polynomial. Anything
else is a file: of `mallee profile` (JSON), or of Dynamo (NPZ).
"""

from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

import msgspec

from mallee.mocker.timing.closed import ClosedForm, Experts
from mallee.mocker.timing.dynamo import Polynomial, load_npz
from mallee.mocker.timing.files import read_timing
from mallee.mocker.timing.model import Timing
from mallee.protocol.errors import ConfigError

DEFAULT_TIMING = "h200-llama-3.1-8b-fp8"
DEFAULT_ENGINE = "vllm"
KERNELS = "kernels"
DYNAMO = "dynamo"
FITTED_FILE = "fitted.json"


class Errors(NamedTuple):
    """Relative errors of predictions, as shares: nearest rank of their sizes, and their mean."""

    median: float
    p95: float
    worst: float
    bias: float
    num_points: int


class Fitted(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A fitted profile: the device alone. Errors are shares, None where nothing was fitted."""

    gpu: str
    model_name: str
    tp: int
    quant: str
    source: str
    is_guess: bool
    kv_bytes_per_token: int
    kv_tokens: int  # that fit beside the weights
    prefill_error: Errors | None
    decode_error: Errors | None
    model: ClosedForm | Experts


class EngineCosts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Costs that an engine adds to the device: factors on its passes, seconds a step and a request."""

    prefill: float
    decode: float
    overhead_s: float
    request_s: float
    source: str

    def timing(self, device: ClosedForm | Experts) -> Timing:
        return Timing(
            device.scaled(self.prefill, self.decode),
            overhead_s=self.overhead_s,
            request_s=self.request_s,
        )


class FittedFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All that comes with the package. Credits must stay with the figures."""

    credits: str
    engines: dict[str, EngineCosts]
    profiles: dict[str, Fitted]


@cache
def fitted() -> FittedFile:
    """The profiles that come with the package."""
    data = files("mallee.mocker.timing").joinpath(FITTED_FILE).read_bytes()
    return msgspec.json.decode(data, type=FittedFile)


class KVRoom(NamedTuple):
    """KV memory of a device beside its model: the tokens that fit, and the bytes of one; 0: not known."""

    tokens: int
    token_nbytes: int


def kv_room(name_or_path: str) -> KVRoom:
    """KV memory as the timing of that name, or in that file, tells of it. Raises ConfigError."""
    profile = fitted().profiles.get(name_or_path.partition("@")[0])
    if profile is not None:
        return KVRoom(profile.kv_tokens, profile.kv_bytes_per_token)
    if name_or_path == DYNAMO or (path := _file(name_or_path)).suffix == ".npz":
        return KVRoom(0, 0)
    found = read_timing(path)
    return KVRoom(int(found.conditions.get("kv_tokens", 0)), found.kv_bytes_per_token)


def gpus_of(name_or_path: str) -> int:
    """GPUs that an engine of that timing is spread over; 1 of a file, which does not say."""
    profile = fitted().profiles.get(name_or_path.partition("@")[0])
    return 1 if profile is None else profile.tp


def load_timing(name_or_path: str, *, kv_tokens: int | None = None) -> Timing:
    """The timing of that name, or in that file.

    `kv_tokens` is what the KV memory of an engine holds; only `dynamo` asks for it. Raises ConfigError
    naming what there is, or what is wrong with the file.
    """
    name, _, engine = name_or_path.partition("@")
    profile = fitted().profiles.get(name)
    if profile is not None:
        return _of_device(profile.model, engine or DEFAULT_ENGINE)
    if name_or_path == DYNAMO:
        if kv_tokens is None:
            raise ConfigError("timing='dynamo' depends on the KV memory: say how large it is")
        return Timing(Polynomial(kv_tokens))
    path = _file(name_or_path)
    if path.suffix == ".npz":
        return Timing(load_npz(path))
    return read_timing(path).timing()


def timing_names() -> list[str]:
    """Names that `load_timing` knows."""
    return [*fitted().profiles, DYNAMO]


def _file(name_or_path: str) -> Path:
    path = Path(name_or_path)
    if not path.is_file():
        raise ConfigError(
            f"timing={name_or_path!r} is no file and none of the profiles {', '.join(timing_names())}"
        )
    return path


def _of_device(device: ClosedForm | Experts, engine: str) -> Timing:
    if engine == KERNELS:
        return Timing(device)
    costs = fitted().engines.get(engine)
    if costs is None:
        known = ", ".join([*fitted().engines, KERNELS])
        raise ConfigError(f"engine={engine!r} after the @: there are {known}")
    return costs.timing(device)


def fits_table() -> list[str]:
    """The profiles and how near they are to what was measured, in lines for people."""
    head = f"{'prefill error':>22} {'decode error':>22} {'KV tokens':>11} {'bytes each':>11}"
    lines = [f"{'profile':<28} {head}   source"]
    for name, profile in fitted().profiles.items():
        lines.append(
            f"{name:<28} {_shares(profile.prefill_error):>22} {_shares(profile.decode_error):>22}"
            f" {profile.kv_tokens:>11,} {profile.kv_bytes_per_token:>11,}"
            f"   {profile.source}{' (a guess)' if profile.is_guess else ''}"
        )
    lines.append("errors: median / 95 % / worst, relative to the measured seconds of a pass")
    for engine, costs in fitted().engines.items():
        lines.append(
            f"@{engine}: prefill x {costs.prefill:.3g}, decode x {costs.decode:.3g},"
            f" {1000 * costs.overhead_s:.3g} ms a step and {1000 * costs.request_s:.3g} ms"
            f" a request ({costs.source})"
        )
    return lines


def _shares(errors: Errors | None) -> str:
    if errors is None:
        return "-"
    return " / ".join(f"{100 * value:.1f}" for value in errors[:3]) + " %"
