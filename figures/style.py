"""Style of all figures: one palette, one size of text, the same on paper and inside a page.

Colours are Okabe and Ito's, distinguishable with any kind of colour blindness; a policy keeps
its colour, dash and marker in all figures, so that no figure depends on colour alone.
"""

import functools
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, ParamSpec, TypeVar

from mallee.protocol.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

P = ParamSpec("P")
T = TypeVar("T")

INK: Final = "#1c2128"
GRID: Final = "#d3d9e0"
BLUE, ORANGE, GREEN, RED, PINK, SKY, GREY = (
    *("#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#7a828c"),
)


class Look(NamedTuple):
    """Colour, dash and marker of one line."""

    color: str
    dash: Any
    marker: str


POLICY_LOOKS: Final[dict[str, Look]] = {
    "cost": Look(BLUE, "-", "o"),
    "prefix_only": Look(ORANGE, (0, (5, 1.5)), "s"),
    "least_loaded": Look(GREEN, (0, (5, 1.5, 1, 1.5)), "^"),
    "round_robin": Look(RED, (0, (2, 1)), "D"),
    "random": Look(PINK, (0, (1, 1)), "v"),
    "dynamo": Look(SKY, (0, (7, 2)), "P"),
}
_SHORT_AXIS: Final = 20.0  # from end to end of a logarithmic one: more of its numbers are shown
_LONG_AXIS: Final = 1e4  # fewer
OTHER_LOOK: Final = Look(GREY, "-", "o")

_RC: Final[Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9.5,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.labelsize": 9.5,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.8,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.major.size": 3,
    "ytick.major.size": 3,
    "xtick.minor.size": 0,
    "ytick.minor.size": 0,
    "lines.linewidth": 1.9,
    "lines.markersize": 5,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "legend.handlelength": 2.6,
    "svg.fonttype": "none",
    "svg.hashsalt": "mallee",
}


def require_matplotlib() -> None:
    """Raises ConfigError naming the extra if figures can't be drawn."""
    try:
        import matplotlib  # noqa: F401  heavy, and an extra
    except ModuleNotFoundError as error:
        raise ConfigError(
            "figures need matplotlib: pip install 'mallee[plots]' (JSON and CSV go without)"
        ) from error


def styled(draw: Callable[P, T]) -> Callable[P, T]:
    """`draw` in this style. Raises ConfigError where matplotlib is missing."""

    @functools.wraps(draw)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        require_matplotlib()
        import matplotlib

        with matplotlib.rc_context(_RC):
            return draw(*args, **kwargs)

    return wrapped


def new_figure(width: float = 6.4, height: float = 3.8) -> "Figure":
    """An empty figure, inches wide and high, without axes."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


@styled
def save_png(figure: "Figure", path: Path) -> None:
    """A PNG on white, 160 dots an inch; the same bytes for the same figure."""
    figure.savefig(path, format="png", dpi=160, facecolor="white", metadata={"Software": None})


@styled
def to_svg(figure: "Figure") -> str:
    """An `<svg>` to be put into a page: ink and grid take the page's colours, nothing is behind it."""
    raw = io.StringIO()
    figure.savefig(raw, format="svg", transparent=True, metadata={"Date": None})
    text = raw.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1)
    text = text.replace("'DejaVu Sans'", "inherit").replace("DejaVu Sans", "inherit")
    return text.replace(INK, "currentColor").replace(GRID, "var(--grid)").strip()


def look_of(policy: str) -> Look:
    return POLICY_LOOKS.get(policy, OTHER_LOOK)


def plain_log_ticks(axes: "Axes", which: str) -> None:
    """Numbers such as 0.1, 1, 300 instead of powers of ten on a logarithmic axis, "x" or "y".

    Call it after everything is drawn.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis = axes.xaxis if which == "x" else axes.yaxis
    low, high = sorted(axes.get_xlim() if which == "x" else axes.get_ylim())
    few = (1.0,) if high > _LONG_AXIS * low else (1.0, 3.0)
    subs = (1.0, 2.0, 3.0, 5.0) if high < _SHORT_AXIS * low else few
    axis.set_major_locator(LogLocator(base=10, subs=subs, numticks=12))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axis.set_minor_formatter(NullFormatter())
