"""The screen of `mallee top`."""

import asyncio
from collections.abc import Iterator
from typing import ClassVar, Final

from rich.console import Group, RenderableType
from rich.text import Text
from textual import on, work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.widget import Widget
from textual.widgets import DataTable, Footer, Static, TabbedContent, TabPane

from mallee.cli.remote import fleet
from mallee.cli.remote.course import course_parts, decision_parts, ms
from mallee.cli.remote.fleet import Sample
from mallee.cli.remote.screen import cache, load
from mallee.cli.remote.screen.asking import LiveService, Look
from mallee.cli.remote.screen.tables import LiveTable
from mallee.protocol.api.operator import Course, Decision
from mallee.protocol.errors import MalleeError, NotFound

PANES: Final = ("workers", "cache", "load", "requests")
DECISIONS: Final = (
    *("request", "worker", "reason", "prompt", "cached", "price, ms", "workers", "spill", "pull"),
)
_NUMBERS: Final = frozenset(("prompt", "cached", "price, ms", "workers"))
_ID_CHARS: Final = 12
_FORGOTTEN: Final = "the course of its request is not remembered any more"


class Pane(Vertical):
    """A pane's widgets, the first of which is a line that says what is missing."""

    def say(self, missing: str) -> None:
        line = self.query_one(".missing", Static)
        line.update(missing)
        line.display = bool(missing)


class Top(App[None]):
    """Panes that are told by one task, look by look; the task alone asks for them.

    `service` is closed at the end.
    """

    CSS = """
    #head { height: auto; padding: 0 1; }
    #trouble { height: auto; padding: 0 1; color: $text-error; display: none; }
    TabbedContent, ContentSwitcher, TabPane { height: 1fr; }
    TabPane { padding: 0; }
    .missing { height: auto; padding: 0 1; color: $text-warning; display: none; }
    LiveTable { height: 1fr; }
    .details { height: 1fr; border-top: solid $primary; padding: 0 1; }
    .details Static { width: auto; }
    """
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        *(
            Binding(str(number), f"pane('{name}')", name.capitalize(), show=False)
            for number, name in enumerate(PANES, 1)
        ),
        Binding("r", "refresh", "Refresh"),
        Binding("d", "toggle_dark", "Dark or light"),
        Binding("q", "quit", "Quit"),
        Binding("ctrl+c", "quit", "Quit", show=False, priority=True),
    ]

    def __init__(self, service: LiveService, *, interval_s: float) -> None:
        super().__init__()
        self._service = service
        self._interval_s = interval_s
        self._history = load.History()
        self._decisions: dict[str, Decision] = {}
        self._asked = asyncio.Event()  # for a look before the interval is over

    # Widgets

    def compose(self) -> ComposeResult:
        yield Static(id="head")
        yield Static(id="trouble", markup=False)
        with TabbedContent(initial="workers"):
            for number, name in enumerate(PANES, 1):
                with TabPane(f"{number} {name}", id=name), Pane():
                    yield Static(classes="missing", markup=False)
                    yield from self._widgets(name)
        yield Footer()

    def _widgets(self, pane: str) -> Iterator[Widget]:
        match pane:
            case "workers":
                yield LiveTable(fleet.COLUMNS, id="fleet", numbers=fleet.NUMBERS)
            case "cache":
                yield LiveTable(cache.COLUMNS, id="tiers", numbers=cache.NUMBERS)
            case "load":
                yield LiveTable(load.COLUMNS, id="figures", numbers=("now", "most"))
            case "requests":
                yield LiveTable(DECISIONS, id="decisions", numbers=_NUMBERS)
                yield VerticalScroll(Static(id="decision"), classes="details")

    def on_mount(self) -> None:
        self.title = f"mallee top {self._service.url}"
        self._focus_pane()
        self._watch()

    async def on_unmount(self) -> None:
        await self._service.close()

    @property
    def pane(self) -> str:
        """The one that is shown."""
        return self.query_one(TabbedContent).active

    # Looks

    @work(exclusive=True, group="watch")
    async def _watch(self) -> None:
        """Look, and wait for the next time or a key. A look that takes long delays the next, and no key."""
        while self.is_running:
            self._asked.clear()
            look = await self._service.look(wants_decisions=self.pane == "requests")
            if not self.is_running:
                return
            self._show(look)
            try:
                async with asyncio.timeout(self._interval_s):
                    await self._asked.wait()
            except TimeoutError:
                continue

    def _show(self, look: Look) -> None:
        if look.health is None:
            self._say(f"{look.trouble}; what is shown is older")
            return
        self._say(look.trouble)
        head: RenderableType = fleet.head(look.health)
        if look.fleet is not None:
            for name in ("workers", "cache", "load"):
                self._pane(name).say(look.fleet.missing)
            if look.fleet.answer is not None:
                head = self._show_fleet(look.fleet.answer)
        self.query_one("#head", Static).update(head)
        if look.decisions is not None:
            self._pane("requests").say(look.decisions.missing)
            self._show_decisions(look.decisions.answer)

    def _show_fleet(self, sample: Sample) -> RenderableType:
        """Returns the lines at the top."""
        before = self._history.add(sample)
        self.query_one("#fleet", LiveTable).tell(
            (each.worker, fleet.cells(each)) for each in sample.workers
        )
        self.query_one("#tiers", LiveTable).tell(cache.rows(sample))
        self.query_one("#figures", LiveTable).tell(self._history.rows())
        figures = {**sample.gauges(), **sample.rates(before)}
        return Group(fleet.head(sample.health), fleet.figures_line(figures))

    def _show_decisions(self, decisions: list[Decision] | None) -> None:
        if decisions is not None:
            self._decisions = {str(each.number): each for each in decisions}
            table = self.query_one("#decisions", LiveTable)
            table.tell((key, _cells(each)) for key, each in self._decisions.items())
            self._show_decision(table.selected)

    def _pane(self, name: str) -> Pane:
        return self.query_one(f"#{name} Pane", Pane)

    def _say(self, trouble: str) -> None:
        line = self.query_one("#trouble", Static)
        line.update(trouble)
        line.display = bool(trouble)

    # What is at the cursor

    @on(DataTable.RowHighlighted, "#decisions")
    def _on_decision(self, event: DataTable.RowHighlighted) -> None:
        self._show_decision(event.row_key.value)

    @work(exclusive=True, group="decision")
    async def _show_decision(self, key: str | None) -> None:
        if not self.is_running:
            return
        decision, view = self._decisions.get(key or ""), self.query_one("#decision", Static)
        parts: list[RenderableType] = []
        if decision is not None:
            course = await self._course(decision.request)
            parts += decision_parts(decision)
            parts += (
                [Text(course, style="dim")] if isinstance(course, str) else course_parts(course)
            )
        if self.is_running:
            view.update(Group(*parts))

    async def _course(self, request: str) -> Course | str:
        """Or a sentence that says why it isn't known."""
        try:
            return await self._service.course(request) or _FORGOTTEN
        except NotFound:
            return _FORGOTTEN
        except MalleeError as error:
            return str(error)

    # Keys

    def _focus_pane(self) -> None:
        self.query_one(f"#{self.pane} LiveTable").focus()

    @on(TabbedContent.TabActivated)
    def _on_pane(self) -> None:
        self._focus_pane()
        self.refresh_bindings()
        self._asked.set()

    def action_pane(self, name: str) -> None:
        self.query_one(TabbedContent).active = name

    def action_refresh(self) -> None:
        self._asked.set()


def _cells(decision: Decision) -> tuple[Text, ...]:
    chosen = next((each for each in decision.candidates if each.worker == decision.worker), None)
    name, cut = decision.request[:_ID_CHARS], decision.request[_ID_CHARS:]
    told = (
        f"{name}…" if cut else name,
        decision.worker,
        decision.reason,
        str(decision.prompt_tokens),
        "" if chosen is None else str(chosen.overlap_blocks),
        "" if chosen is None else ms(chosen.total),
        str(decision.num_candidates),
        decision.spill.how if decision.spill else "",
        decision.pull.reason if decision.pull else "",
    )
    return tuple(map(Text, told))
