"""JSON files and folders that commands write beside figures."""

import os
from pathlib import Path
from typing import Any

import msgspec

from mallee.protocol.errors import ConfigError


def as_json(data: Any) -> bytes:
    """Indented, with null for numbers that are none, and a newline at the end."""
    return msgspec.json.format(msgspec.json.encode(data), indent=2) + b"\n"


def made_folder(out_dir: Path | str) -> Path:
    """The folder, made if need be. Raises ConfigError."""
    folder = Path(out_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {folder}: not a folder to write to ({error.strerror})") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"--out {folder}: not a folder to write to (no permission)")
    return folder
