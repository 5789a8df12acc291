"""Whether the packages of the service are there. Imports nothing that a base install lacks."""

from importlib.util import find_spec

from mallee.protocol.errors import ConfigError

_SERVING = ("safetensors", "tokenizers", "llguidance", "starlette", "nats", "pydantic")
_COMPUTING = ("ray", "torch")


def require_serve_extra(*, is_mocked: bool = False) -> None:
    """Raises ConfigError that names the remedy if packages of the service are missing.

    With `is_mocked` nothing is computed and nothing deployed: that needs neither torch nor Ray.
    """
    needed = _SERVING if is_mocked else (*_COMPUTING, *_SERVING)
    missing = [name for name in needed if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"{', '.join(missing)} not installed: run `pip install torch 'mallee[serve]'` to serve"
            " models",
            missing=missing,
        )
