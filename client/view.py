"""The tree of a fork in a terminal: the capsule at the root, one line per branch, live."""

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.live import Live
from rich.text import Text
from rich.tree import Tree

from mallee.client.results import BranchState
from mallee.client.sync import Branch, Branches

REFRESH_PER_SECOND = 12


def render(
    title: str, branches: Mapping[int, BranchState], *, labels: Sequence[str] = (), width: int = 100
) -> Tree:
    """The tree as it stands: each branch's label and figures, below them the end of its text.

    Labelled branches without text are shown as waiting.
    """
    tree = Tree(Text(title, style="bold"), guide_style="green")
    for index in sorted({*range(len(labels)), *branches}):
        label = labels[index] if index < len(labels) else f"branch {index}"
        branch = branches.get(index)
        node = tree.add(_head(label, branch))
        if branch is not None and branch.text:
            node.add(_tail(branch.text, max(20, width - 10)))
    return tree


def live(
    branches: Branches,
    title: str,
    *,
    labels: Sequence[str] = (),
    console: Console | None = None,
) -> list[Branch]:
    """Show the tree while the branches stream; returns them finished.

    Where the console is not a terminal only the final tree is printed. Raises what the stream raises.
    """
    console = console or Console()
    state = branches.branches
    with Live(
        render(title, state, labels=labels, width=console.width),
        console=console,
        refresh_per_second=REFRESH_PER_SECOND,
    ) as view:
        for _ in branches.events():
            view.update(render(title, state, labels=labels, width=console.width))
    return branches.wait()


def _head(label: str, branch: BranchState | None) -> Text:
    text = Text(label, style="cyan")
    if branch is None:
        return text.append("  waiting", style="dim")
    if branch.ttft_ms is not None:
        text.append(f"  first token {branch.ttft_ms:.0f} ms", style="yellow")
    if branch.finish_reason is not None:
        text.append(
            f"  {branch.worker}  cached {branch.cached_tokens}  computed {branch.prefill_tokens}"
            f"  [{branch.finish_reason}]",
            style="dim",
        )
    return text


def _tail(text: str, width: int) -> Text:
    """The end of `text`, two lines' worth, as one logical line."""
    flat = " ".join(text.split())
    room = 2 * width
    return Text(flat if len(flat) <= room else "…" + flat[1 - room :])
