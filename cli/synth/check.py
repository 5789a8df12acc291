"""Checks of options before anything is read or learned. All raise ConfigError."""

from dataclasses import fields
from pathlib import Path
from typing import Final

from mallee.cli.synth.reading import Reading
from mallee.protocol.errors import ConfigError

STDOUT: Final = Path("-")


def check_files(source: Path | None, out: Path, save_model: Path | None) -> None:
    """Refuses files that are missing, can't be written or overwrite one another."""
    if source is not None and not source.exists():
        raise ConfigError(f"--from={source}: no such file")
    written = {} if out == STDOUT else {"to": out}
    if save_model is not None:
        written["save-model"] = save_model
    for name, path in written.items():
        if not path.parent.is_dir():
            raise ConfigError(f"--{name}={path}: there is no folder {path.parent}")
        if source is not None and _is_same(path, source):
            raise ConfigError(f"--{name}={path}: is what --from reads; give another file")
    if save_model is None:
        return
    if save_model.exists() and not save_model.is_file():
        raise ConfigError(f"--save-model={save_model}: is no plain file; give one to write")
    if _is_same(save_model, out):
        raise ConfigError(f"--save-model={save_model}: is --to, too; give another file")


def _is_same(one: Path, other: Path) -> bool:
    """Devices may be given twice."""
    is_special = one.exists() and not one.is_file()
    return not is_special and one.resolve() == other.resolve()


def check_loop(format: str, open_loop: bool | None) -> None:
    """Refuses a choice that the format does not have."""
    if open_loop is False and format == "mooncake":
        raise ConfigError("--closed-loop: Mooncake's rows don't wait; add --format agentic")
    if open_loop and format == "dag":
        raise ConfigError("--open-loop: conversations wait for answers; add --format mooncake")


def check_learned(what: str, kind: str, asked: str | None, reading: Reading) -> None:
    """Refuses options of reading where `what` is no trace, and another kind of model than it is."""
    for each in fields(reading):
        if each.name != "block_size" and getattr(reading, each.name) != each.default:
            option = each.name.replace("_", "-")
            raise ConfigError(f"--{option}: says how to read a trace, {what} is none; leave it out")
    if asked not in (None, kind):
        raise ConfigError(f"--model={asked}: {what} is a {kind} model; leave it out")
