"""Packages that only the `synth` extra installs."""

import importlib
from typing import Any

from mallee.protocol.errors import ConfigError


def scipy(part: str) -> Any:
    """`scipy.part`. Raises ConfigError if scipy is not there."""
    try:
        return importlib.import_module(f"scipy.{part}")
    except ImportError as error:
        raise ConfigError(
            "the session model needs the package scipy; pip install 'mallee[synth]', or --model tree"
        ) from error
