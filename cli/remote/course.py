"""The router's decisions and the courses of requests, as tables."""

from collections.abc import Iterator

from rich.console import RenderableType
from rich.text import Text

from mallee.cli.output import grid
from mallee.protocol.api.operator import Course, Decision


def decision_parts(decision: Decision) -> Iterator[RenderableType]:
    """The choice in a sentence, the prices of its workers, and pulls and spills."""
    yield Text.assemble(
        (decision.request, "bold"),
        " went to ",
        (decision.worker, "green"),
        f" ({decision.reason}): {decision.prompt_tokens} tokens,"
        f" {decision.num_candidates} workers could take it",
    )
    terms = ("queued", "prefill", "decode", "fetch", "displaced", "pull")
    numbers = ("cached", "pulled", *terms, "price")
    table = grid(("worker", *numbers), (), right=numbers)
    for each in decision.candidates:
        table.add_row(
            Text(each.worker),
            *(str(each.overlap_blocks), str(each.pulled_blocks)),
            *(ms(getattr(each, f"{term}_s")) for term in terms),
            ms(each.total),
            style="green" if each.worker == decision.worker else None,
        )
    yield table
    if spill := decision.spill:
        prices = f"wait {ms(spill.wait_s)}, migrate {ms(spill.migrate_s)}"
        told = f"{spill.how} ({prices}, recompute {ms(spill.recompute_s)})"
        yield Text(f"a part of a fan-out: {told}")
    if pull := decision.pull:
        yield Text(f"pulls {pull.blocks} blocks ({pull.reason})")


def course_parts(course: Course) -> Iterator[RenderableType]:
    """The use of the cache in a sentence, and the branches."""
    if cache := course.cache:
        missed = f", missed because {cache['reason']}" if cache.get("reason") else ""
        yield Text(f"its prompt was served as {cache['served']}{missed}")
    numbers = ("cached", "computed", "tokens", "tokens/s", "first token", "end")
    rows: Iterator[tuple[Text | str, ...]] = (
        (
            *map(Text, (str(index), each.state, each.worker or "", each.prompt or "")),
            *map(str, (each.cached_tokens, each.prefill_tokens, each.output_tokens)),
            "" if each.tokens_per_s is None else f"{each.tokens_per_s:.0f}",
            ms(each.first_token_s),
            ms(each.end_s),
        )
        for index, each in enumerate(course.branches)
    )
    yield grid(("branch", "state", "worker", "prompt", *numbers), rows, right=numbers)


def ms(seconds: float | None) -> str:
    """Milliseconds."""
    return "-" if seconds is None else f"{1000 * seconds:.1f}"
