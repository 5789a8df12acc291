"""Values of a dashboard: its rows, their panels, and the queries of each."""

from typing import Final, Literal, NamedTuple, Protocol, TypeAlias

from mallee.actors.telemetry.boards.queries import Scope

Kind: TypeAlias = Literal["stat", "lines", "areas", "bars"]

WHOLE: Final = 24  # columns of Grafana's grid


TOKENS_S: Final = "suffix: tok/s"
BLOCKS_S: Final = "suffix: blocks/s"


class Query(NamedTuple):
    """PromQL, and the name of each of its series: `{{label}}` stands for a label's value."""

    expression: str
    legend: str


class Measure(Protocol):
    """PromQL of a family by labels, as `now`, `rate`, `growth` and `mean` of a scope make it."""

    def __call__(self, name: str, *by: str, where: str = "") -> str: ...


class Limits(NamedTuple):
    """Values from which a panel is amber and red; `below`: down to which."""

    warning: float
    critical: float
    below: bool = False


class Panel(NamedTuple):
    """One panel. Its text and those of the metrics that it shows are its description."""

    title: str
    unit: str  # Grafana's name of it
    queries: tuple[Query, ...]
    kind: Kind = "lines"
    text: str = ""
    limits: Limits | None = None
    width: int = 8
    most: float | None = None  # end of its axis


class Row(NamedTuple):
    """Panels under one title."""

    title: str
    panels: tuple[Panel, ...]


class Variable(NamedTuple):
    """A choice at the top of a dashboard: values of `label` among the series of `metric`."""

    label: str
    metric: str
    title: str


class Board(NamedTuple):
    """One dashboard; `name` is its file's and part of its address."""

    name: str
    title: str
    text: str
    variables: tuple[Variable, ...]
    rows: tuple[Row, ...]

    @property
    def uid(self) -> str:
        return f"mallee-{self.name}"


JOB: Final = Variable("job", "mallee_build_info", "Job")
GATEWAY: Final = Variable("gateway", "mallee_broker_up", "Gateway")
WORKER: Final = Variable("worker", "mallee_worker_total_blocks", "Worker")
TENANT: Final = Variable("tenant", "mallee_tenant_requests_total", "Tenant")


def each(
    measure: Measure, name: str, label: str, *, where: str = "", legend: str = ""
) -> tuple[Query, ...]:
    """A family by the values of `label`, which are the legend if none is given."""
    return (Query(measure(name, label, where=where), legend or f"{{{{{label}}}}}"),)


def blocks(scope: Scope) -> tuple[Query, ...]:
    """The KV blocks of workers by their use."""
    live, cached = "mallee_worker_live_blocks", "mallee_worker_cached_blocks"
    free = f"{scope.now('mallee_worker_total_blocks')} - {scope.now(live)} - {scope.now(cached)}"
    return (
        Query(scope.now(live), "in use"),
        Query(scope.now(cached), "cached"),
        Query(free, "free"),
    )


def quantiles(scope: Scope, name: str) -> tuple[Query, ...]:
    """The median of a histogram, and its slow ends."""
    return tuple(Query(scope.quantile(q, name), f"p{100 * q:g}") for q in (0.5, 0.95, 0.99))
