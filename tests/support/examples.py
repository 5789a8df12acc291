"""Numbers of examples for properties."""

from hypothesis import settings


def examples(num: int) -> settings:
    """So many for each 100 of the profile, at least 5."""
    return settings(max_examples=max(5, num * settings.default.max_examples // 100))
