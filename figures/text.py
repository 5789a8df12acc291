"""Numbers as people read them."""

import math
from typing import Final

NOTHING: Final = "-"


def number(value: float | None, unit: str = "") -> str:
    """Three significant digits, thousands apart; a dash for a missing value."""
    if value is None or not math.isfinite(value):
        return NOTHING
    if value and abs(value) < 100:
        digits = max(0, 2 - math.floor(math.log10(abs(value))))
        text = f"{value:.{min(digits, 6)}f}"
        text = text.rstrip("0").rstrip(".") if "." in text else text
    else:
        text = f"{value:,.0f}"
    return f"{text} {unit}".rstrip()


def milliseconds(value: float | None) -> str:
    """In ms, from ten seconds on in s."""
    if value is not None and math.isfinite(value) and value >= 10_000:
        return number(value / 1000, "s")
    return number(value, "ms")


def percent(share: float | None) -> str:
    """Of a share from 0 to 1."""
    return NOTHING if share is None or not math.isfinite(share) else f"{100 * share:.1f} %"


def seconds(value: float) -> str:
    """A length of time in the unit that suits it."""
    for limit, size, unit in ((120.0, 1.0, "s"), (7200.0, 60.0, "min")):
        if value < limit:
            return number(value / size, unit)
    return number(value / 3600, "h")


def time_unit(duration_s: float) -> tuple[float, str]:
    """Seconds, minutes or hours, whichever reads well: the size of one, and its name."""
    for limit, size, unit in ((300.0, 1.0, "s"), (3 * 3600.0, 60.0, "min")):
        if duration_s <= limit:
            return size, unit
    return 3600.0, "h"
