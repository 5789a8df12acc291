"""A check of methods that classes of ours override in other packages, which call them."""

from mallee.protocol.errors import ConfigError


def check_hooks(base: type, *names: str, needs: str) -> None:
    """Raises ConfigError unless `base` has the methods `names`: without one, nothing calls ours, silently.

    `needs`: the versions that have them, as pip is told.
    """
    lacking = [name for name in names if not callable(getattr(base, name, None))]
    if lacking:
        raise ConfigError(
            f"{base.__module__}.{base.__qualname__} of the installed package has no {', '.join(lacking)}, so"
            f" that limits of ours would not hold: install '{needs}'"
        )
