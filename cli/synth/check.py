"""Checks of the options of `mallee synth generate` before anything is read or learned."""

from dataclasses import fields
from pathlib import Path
from typing import get_args

from mallee.cli.synth.reading import Reading
from mallee.cli.synth.writing import STDOUT
from mallee.protocol.errors import ConfigError


def check_words(model: str | None, requests: int | None, format: str | None) -> None:
    """Raises ConfigError for an unknown model or format, or no requests."""
    from mallee.synth.core.model import Kind
    from mallee.traces.write import Format

    if model is not None and model not in get_args(Kind):
        raise ConfigError(f"--model={model}: give one of {', '.join(get_args(Kind))}")
    if format is not None and format not in get_args(Format):
        raise ConfigError(f"--format={format}: give one of {', '.join(get_args(Format))}")
    if requests is not None and requests < 1:
        raise ConfigError(f"--requests={requests}: give at least 1, or leave it out")


def check_files(source: Path | None, out: Path, save_model: Path | None) -> None:
    """Raises ConfigError for files that are missing, can't be written or overwrite one another."""
    if source is not None and not source.exists():
        raise ConfigError(f"--from={source}: no such file")
    for name, path in (("to", out), ("save-model", save_model)):
        if path is None or (path == STDOUT and name == "to"):
            continue
        if not path.parent.is_dir():
            raise ConfigError(f"--{name}={path}: there is no folder {path.parent}")
        if source is not None and _is_same(path, source):
            raise ConfigError(f"--{name}={path}: is what --from reads; give another file")
    if save_model is None:
        return
    if save_model.exists() and not save_model.is_file():
        raise ConfigError(f"--save-model={save_model}: is no plain file; give one to write")
    if out != STDOUT and _is_same(save_model, out):
        raise ConfigError(f"--save-model={save_model}: is --to, too; give another file")


def _is_same(one: Path, other: Path) -> bool:
    """Devices may be given twice."""
    is_special = one.exists() and not one.is_file()
    return not is_special and one.resolve() == other.resolve()


def check_loop(format: str, open_loop: bool | None) -> None:
    """Raises ConfigError if the format has no such choice."""
    if open_loop is False and format == "mooncake":
        raise ConfigError("--closed-loop: Mooncake's rows don't wait; add --format agentic")
    if open_loop and format == "dag":
        raise ConfigError("--open-loop: conversations wait for answers; add --format mooncake")


def check_unread(source: str, reading: Reading) -> None:
    """Raises ConfigError for options of reading that were given although `source` is no trace."""
    for each in fields(reading):
        if each.name != "block_size" and getattr(reading, each.name) != each.default:
            option = each.name.replace("_", "-")
            raise ConfigError(
                f"--{option}: says how to read a trace, {source} is none; leave it out"
            )


def check_kind(what: str, kind: str, asked: str | None) -> None:
    """Raises ConfigError if `what` has another kind of model than `--model`."""
    if asked not in (None, kind):
        raise ConfigError(f"--model={asked}: {what} is a {kind} model; leave it out")
