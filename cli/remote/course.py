"""A request's decisions and its course: as a service tells them, and as tables."""

from collections.abc import Iterator, Sequence
from typing import TypeVar

import msgspec
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from mallee.protocol.errors import ConfigError


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """A worker that could have taken a request. Prices are seconds; None: it could not go there."""

    worker: str
    overlap_blocks: int = 0
    pulled_blocks: int = 0
    queued_s: float | None = None
    prefill_s: float | None = None
    decode_s: float | None = None
    fetch_s: float | None = None
    displaced_s: float | None = None
    pull_s: float | None = None
    total: float | None = None


class Spill(msgspec.Struct, frozen=True, kw_only=True):
    """The way of a part of a fan-out, and the prices that it was chosen by."""

    how: str
    wait_s: float | None = None
    migrate_s: float | None = None
    recompute_s: float | None = None


class Pull(msgspec.Struct, frozen=True, kw_only=True):
    """KV that the worker is told to fetch from others."""

    reason: str
    blocks: int


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """The choice of a worker."""

    number: int
    request: str
    worker: str
    reason: str
    prompt_tokens: int
    num_candidates: int
    candidates: list[Candidate]
    spill: Spill | None = None
    pull: Pull | None = None

    @property
    def chosen(self) -> Candidate | None:
        return next((each for each in self.candidates if each.worker == self.worker), None)


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """The use of the cache by a prompt."""

    served: str
    reason: str | None = None


class State(msgspec.Struct, frozen=True, kw_only=True):
    """A state of a branch, and when it began: seconds since the request came."""

    state: str
    at_s: float


class Stay(msgspec.Struct, frozen=True, kw_only=True):
    """A worker that a branch ran on; None where workers are not named."""

    worker: str | None = None


class BranchCourse(msgspec.Struct, frozen=True, kw_only=True):
    """One branch, as `life` of a decision or a request's own record tells of it."""

    state: str
    prompt: str | None = None
    cached_tokens: int = 0
    prefill_tokens: int = 0
    output_tokens: int = 0
    tokens_per_s: float | None = None
    worker: str | None = None  # these three: of `life`
    first_token_s: float | None = None
    end_s: float | None = None
    workers: list[Stay] = []  # these: of the record
    states: list[State] = []
    capsule: str | None = None

    @property
    def place(self) -> str:
        """Its worker, or all of them in their order."""
        named = [stay.worker for stay in self.workers if stay.worker]
        return self.worker or ", ".join(dict.fromkeys(named))

    def began(self, state: str) -> float | None:
        return next((each.at_s for each in self.states if each.state == state), None)

    @property
    def answers_at(self) -> float | None:
        return self.began("answering") if self.first_token_s is None else self.first_token_s

    @property
    def ends_at(self) -> float | None:
        is_over = self.states and self.states[-1].state not in _RUNNING
        return self.states[-1].at_s if is_over else self.end_s


_RUNNING = ("tokenizing", "waiting", "computing", "answering")


class Course(msgspec.Struct, frozen=True, kw_only=True):
    """The branches of a request, from its arrival to their ends."""

    branches: list[BranchCourse]
    cache: Served | None = None


class Explained(msgspec.Struct, frozen=True, kw_only=True):
    """The body of `GET /v1/router/explain`."""

    data: list[Decision]
    life: Course | None = None


T = TypeVar("T", bound=msgspec.Struct)


def read(body: object, kind: type[T]) -> T:
    """Raises ConfigError if it is none."""
    try:
        return msgspec.convert(body, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"the answer is not {kind.__name__.lower()} ({error})") from error


def decision_parts(decision: Decision) -> Iterator[RenderableType]:
    """The choice in a sentence, the prices of its workers, and pulls and spills."""
    yield Text.assemble(
        *((decision.request, "bold"), " went to ", (decision.worker, "green")),
        f" ({decision.reason}): {decision.prompt_tokens} tokens,"
        f" {decision.num_candidates} workers could take it",
    )
    table = Table(box=None, pad_edge=False)
    table.add_column("worker")
    terms = ("queued", "prefill", "decode", "fetch", "displaced", "pull")
    for name in ("cached", "pulled", *terms, "price"):
        table.add_column(name, justify="right")
    for each in decision.candidates:
        prices = (getattr(each, f"{term}_s") for term in terms)
        table.add_row(
            Text(each.worker),
            *(str(each.overlap_blocks), str(each.pulled_blocks)),
            *map(ms, prices),
            ms(each.total),
            style="green" if each.worker == decision.worker else None,
        )
    yield table
    if (spill := decision.spill) is not None:
        prices_of = {
            "wait": spill.wait_s,
            "migrate": spill.migrate_s,
            "recompute": spill.recompute_s,
        }
        told = ", ".join(f"{name} {ms(seconds)}" for name, seconds in prices_of.items())
        yield Text(f"a part of a fan-out: {spill.how} ({told})")
    if (pull := decision.pull) is not None:
        yield Text(f"pulls {pull.blocks} blocks ({pull.reason})")


def course_parts(course: Course) -> Iterator[RenderableType]:
    """The use of the cache in a sentence, and the branches."""
    if (cache := course.cache) is not None:
        missed = f", missed because {cache.reason}" if cache.reason else ""
        yield Text(f"its prompt was served as {cache.served}{missed}")
    yield _branches(course.branches)


def _branches(branches: Sequence[BranchCourse]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("branch", "state", "worker", "prompt"):
        table.add_column(name)
    for name in ("cached", "computed", "tokens", "tokens/s", "first token", "end"):
        table.add_column(name, justify="right")
    for index, each in enumerate(branches):
        speed = each.tokens_per_s
        table.add_row(
            *(Text(told) for told in (str(index), each.state, each.place, each.prompt or "")),
            *map(str, (each.cached_tokens, each.prefill_tokens, each.output_tokens)),
            "" if speed is None else f"{speed:.0f}",
            *(ms(each.answers_at), ms(each.ends_at)),
        )
    return table


def ms(seconds: float | None) -> str:
    """Milliseconds."""
    return "-" if seconds is None else f"{1000 * seconds:.1f}"
