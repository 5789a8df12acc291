"""One self-contained HTML page: headline figures, figures, tables. Dark and light as the reader has it.

No scripts, nothing is loaded from elsewhere. Everything that comes from outside is escaped.
"""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from mallee.figures.files import as_json, made_folder
from mallee.figures.style import save_png, to_svg
from mallee.protocol.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_CSS: Final = """
:root{color-scheme:light dark;--bg:#fff;--ink:#1c2128;--dim:#5b6570;--card:#f5f7f9;--grid:#d3d9e0}
@media(prefers-color-scheme:dark){:root{--bg:#14181d;--ink:#e3e8ee;--dim:#98a4b1;--card:#1d232a;
--grid:#38424d}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:1120px;padding:2rem 1.25rem 4rem;background:var(--bg);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI","DejaVu Sans",sans-serif}
h1{font-size:1.6rem;line-height:1.25;margin:0 0 .25rem}
h2{font-size:1.1rem;margin:2.25rem 0 .75rem}
.sub,.note,figcaption{color:var(--dim)}
.sub{margin:0 0 1.5rem}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(180px,1fr));gap:.75rem}
.tile{background:var(--card);border-radius:8px;padding:.75rem .9rem}
.tile b{display:block;font-size:1.45rem;line-height:1.2;font-weight:650;font-variant-numeric:tabular-nums}
.tile span{color:var(--dim);font-size:.82rem}
.figures{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,480px),1fr));gap:1rem}
figure{margin:0;background:var(--card);border-radius:8px;padding:.9rem}
figure svg{width:100%;height:auto;display:block}
figcaption{font-size:.85rem;padding-top:.35rem}
.wide{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums;font-size:.9rem}
th,td{padding:.35rem .6rem;text-align:right;border-bottom:1px solid var(--grid);white-space:nowrap}
th{color:var(--dim);font-weight:600}
th:first-child,td:first-child{text-align:left}
tr.best td{font-weight:650}
dl{display:grid;grid-template-columns:repeat(auto-fill,minmax(250px,1fr));gap:.15rem 2.5rem;
margin:0;font-size:.9rem;font-variant-numeric:tabular-nums}
dl div{display:flex;justify-content:space-between;gap:1rem;border-bottom:1px solid var(--grid);
padding:.3rem 0}
dl div.long{grid-column:1/-1}
dt{color:var(--dim)}
dd{margin:0;text-align:right;overflow-wrap:anywhere}
details{margin-top:1rem}
summary{cursor:pointer;color:var(--dim)}
code{font-family:ui-monospace,"DejaVu Sans Mono",monospace;font-size:.88em}
"""


_SHORT: Final = 34  # characters of a name and its value that fit side by side
_LONG: Final = ' class="long"'


class Tile(NamedTuple):
    """A headline figure."""

    value: str
    name: str


class Picture(NamedTuple):
    """An `<svg>`, its title and its caption."""

    svg: str
    name: str
    caption: str


class Table(NamedTuple):
    """`rows` of text; those in `best` stand out."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    best: frozenset[int] = frozenset()


class Facts(NamedTuple):
    """Names with one value each. Folded ones open on a click."""

    title: str
    pairs: Sequence[tuple[str, str]]
    is_folded: bool = False


class Page(NamedTuple):
    """A page before it is written. `figures` are by file name, each with its caption."""

    title: str
    subtitle: str
    tiles: Sequence[Tile]
    figures: "Mapping[str, tuple[Figure, str]]"
    sections: Sequence[Table | Facts]


def write_page(out_dir: Path | str, name: str, data: Any, page: Page) -> list[Path]:
    """`name`.json of `data`, a PNG for each figure and `name`.html in `out_dir`; their paths.

    The folder is made if need be, files of these names are replaced. Raises ConfigError if it can't be
    written to.
    """
    folder = made_folder(out_dir)
    written, pictures = [folder / f"{name}.json"], []
    try:
        written[0].write_bytes(as_json(data))
        for file, (figure, caption) in page.figures.items():
            written.append(folder / f"{file}.png")
            save_png(figure, written[-1])
            title = figure.axes[0].get_title(loc="left")
            pictures.append(Picture(to_svg(figure), title, caption))
        written.append(folder / f"{name}.html")
        html = render(page.title, page.subtitle, page.tiles, pictures, page.sections)
        written[-1].write_text(html, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{folder}: can't be written to ({error.strerror})") from error
    return written


def render(
    title: str,
    subtitle: str,
    tiles: Sequence[Tile],
    pictures: Sequence[Picture],
    sections: Sequence[Table | Facts],
) -> str:
    """The whole page."""
    body = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="sub">{escape(subtitle)}</p>',
        '<section class="tiles">' if tiles else "",
        *(
            f'<div class="tile"><b>{escape(t.value)}</b><span>{escape(t.name)}</span></div>'
            for t in tiles
        ),
        "</section>" if tiles else "",
        "<h2>Figures</h2>" if pictures else "",
        '<section class="figures">',
        *(_picture(picture) for picture in pictures),
        "</section>",
        *(_table(each) if isinstance(each, Table) else _facts(each) for each in sections),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_CSS}</style></head>\n<body>\n"
        + "\n".join(part for part in body if part)
        + "\n</body></html>\n"
    )


def _picture(picture: Picture) -> str:
    svg = picture.svg.replace("<svg", f'<svg role="img" aria-label="{escape(picture.name)}"', 1)
    return f"<figure>{svg}<figcaption>{escape(picture.caption)}</figcaption></figure>"


def _table(table: Table) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in table.head)
    rows = "\n".join(
        ('<tr class="best">' if i in table.best else "<tr>")
        + "".join(f"<td>{escape(cell)}</td>" for cell in row)
        + "</tr>"
        for i, row in enumerate(table.rows)
    )
    note = f'<p class="note">{escape(table.note)}</p>' if table.note else ""
    whole = (
        f'{note}<div class="wide"><table><thead><tr>{head}</tr></thead>\n'
        f"<tbody>{rows}</tbody></table></div>"
    )
    return f"<h2>{escape(table.title)}</h2>{whole}"


def _facts(facts: Facts) -> str:
    pairs = "\n".join(
        f"<div{_LONG if _is_long((name, value)) else ''}>"
        f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>"
        for name, value in sorted(facts.pairs, key=_is_long)
    )
    content = f"<dl>{pairs}</dl>"
    if facts.is_folded:
        return f"<details><summary>{escape(facts.title)}</summary>{content}</details>"
    return f"<h2>{escape(facts.title)}</h2>{content}"


def _is_long(pair: tuple[str, str]) -> bool:
    return len(pair[0]) + len(pair[1]) > _SHORT
