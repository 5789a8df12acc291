"""Whether the packages of the service are there. Imports nothing that a base install lacks."""

from importlib.util import find_spec

from mallee.protocol.errors import ConfigError

NEEDED = (
    *("ray", "torch", "safetensors", "tokenizers", "llguidance", "fastapi", "nats", "pydantic"),
)


def require_serve_extra() -> None:
    """Raises ConfigError that names the remedy if packages of the service are missing."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"{', '.join(missing)} not installed: run `pip install torch 'mallee[serve]'` to serve"
            " models",
            missing=missing,
        )
