"""A table whose rows are told again and again: its cursor stays with its row."""

from collections.abc import Collection, Iterable, Sequence
from typing import Final, Literal

from rich.text import Text
from textual.widgets import DataTable

NO_NUMBERS: Final[frozenset[str]] = frozenset()


class LiveTable(DataTable[Text]):
    """Rows by key. `numbers`: columns that stand to the right."""

    def __init__(
        self, columns: Sequence[str], *, id: str, numbers: Collection[str] = NO_NUMBERS
    ) -> None:
        super().__init__(id=id, cursor_type="row", zebra_stripes=True)
        self._names = columns
        self._numbers = numbers
        self._shown: dict[str, tuple[Text, ...]] = {}

    def on_mount(self) -> None:
        for name in self._names:
            self.add_column(Text(name, justify=self._justify(name)), key=name)

    def _justify(self, name: str) -> Literal["left", "right"]:
        return "right" if name in self._numbers else "left"

    @property
    def selected(self) -> str | None:
        """The key of the row at the cursor."""
        keys = list(self._shown)
        return keys[self.cursor_row] if 0 <= self.cursor_row < len(keys) else None

    def tell(self, rows: Iterable[tuple[str, Sequence[Text]]]) -> None:
        """Show these rows and no others; what is as before isn't touched."""
        told = {key: self._aligned(cells) for key, cells in rows}
        if list(told) == list(self._shown):
            for key, cells in told.items():
                for name, cell, old in zip(self._names, cells, self._shown[key], strict=True):
                    if cell != old:
                        self.update_cell(key, name, cell, update_width=True)
        else:
            at = self.selected
            self.clear()
            for key, cells in told.items():
                self.add_row(*cells, key=key)
            if at in told:
                self.move_cursor(row=list(told).index(at))
        self._shown = told

    def _aligned(self, cells: Sequence[Text]) -> tuple[Text, ...]:
        for name, cell in zip(self._names, cells, strict=True):
            cell.justify = self._justify(name)
        return tuple(cells)
