"""Numbers of examples for properties."""

from hypothesis import settings


def examples(num: int) -> settings:
    """`num` in the whole check; the fast lane's profile has fewer, the long one more."""
    return settings(max_examples=max(5, num * settings.default.max_examples // 100))
