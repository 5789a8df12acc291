"""`mallee tree`: a tree of text from one prompt, grown by one engine here.

The prompt is computed once. Each level forks every text of the level above, so that no prefix is
computed twice.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group
from rich.text import Text
from rich.tree import Tree

from mallee.cli.options import JsonOption, ModelOption, require_serve_extra
from mallee.cli.output import answer
from mallee.protocol.errors import InvalidParameter, from_wire

if TYPE_CHECKING:
    from mallee.api.text.tokenizer import Tokenizer
    from mallee.protocol.messages import Command
    from mallee.worker.engine import Engine
    from mallee.worker.forward import Forward

MAX_TEXTS = 4096


def tree(
    prompt: Annotated[str, typer.Argument(help="The text that everything continues.")],
    model: ModelOption = "smollm2",
    width: Annotated[int, typer.Option(min=1, help="Continuations of each text.")] = 3,
    depth: Annotated[int, typer.Option(min=1, help="Levels of continuations.")] = 2,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of each continuation.")] = 12,
    seed: Annotated[int, typer.Option(min=0, help="Same seed, same tree.")] = 0,
    dtype: Annotated[str, typer.Option(help="auto, bfloat16 or float32.")] = "auto",
    as_json: JsonOption = False,
) -> None:
    """Grow a tree of text from one prompt in this process, and draw it.

    Example: mallee tree "Once upon a time" --width 3 --depth 2
    """
    require_serve_extra()
    from mallee.api.text.tokenizer import Tokenizer
    from mallee.worker.model.loading.source import resolve_model
    from mallee.worker.model.runner import load

    folder = resolve_model(model)
    tokenizer = Tokenizer.load(folder)
    forward = load(folder, kv_budget_bytes=1 << 30, dtype=dtype)
    begun = time.perf_counter()
    root, engine = grow(
        forward, tokenizer.encode(prompt), width=width, depth=depth, tokens=tokens, seed=seed
    )
    seconds = time.perf_counter() - begun
    stats = engine.stats()
    body = {
        "texts": texts(root, tokenizer),
        "output_tokens": stats.num_output_tokens,
        "prefill_tokens": stats.num_prefill_tokens,
        "cached_tokens": stats.num_cached_tokens,
        "seconds": round(seconds, 3),
    }
    figures = (
        f"{stats.num_output_tokens} tokens drawn, {stats.num_prefill_tokens} computed for prompts,"
        f" {stats.num_cached_tokens} shared, in {seconds:.1f} s"
    )
    answer(body, Group(draw(root, tokenizer), figures), as_json=as_json)


@dataclass(slots=True)
class Branch:
    """Tokens that one branch added, and what was forked from its end."""

    tokens: list[int] = field(default_factory=list)
    children: list["Branch"] = field(default_factory=list)
    capsule: str | None = None


def grow(
    forward: "Forward", prompt: Sequence[int], *, width: int, depth: int, tokens: int, seed: int
) -> tuple[Branch, "Engine"]:
    """`depth` levels of `width` sampled continuations each; the root is the prompt. Raises MalleeError."""
    from mallee.protocol.ids import Incarnation, WorkerId
    from mallee.protocol.messages import Fork, Limits, Prefill, Sampling, pack_tokens
    from mallee.worker.engine import Engine
    from mallee.worker.records import EngineConfig

    for name, value in (("width", width), ("depth", depth), ("tokens", tokens)):
        if value < 1:
            raise InvalidParameter(name, value, "give at least 1")
    if sum(width**level for level in range(1, depth + 1)) > MAX_TEXTS:
        raise InvalidParameter(
            "depth", depth, f"{width} to the power of {depth} are more than {MAX_TEXTS} texts"
        )
    engine = Engine(
        forward,
        config=EngineConfig(max_answer_capsules=MAX_TEXTS),
        clock=time.monotonic,
        worker=WorkerId("tree"),
        incarnation=Incarnation(1),
    )
    root = Branch(list(prompt))
    _run(engine, [Prefill("root", pack_tokens(prompt))], {("root", 0): root})
    limits = Limits(tokens)
    level = [root]
    for number in range(depth):
        grown: dict[tuple[str, int], Branch] = {}
        commands: list[Command] = []
        for parent in level:
            if parent.capsule is None:  # it ended with nothing to go on from
                continue
            name = f"{number}-{len(commands)}"
            own_seed = seed + len(commands) + 1000 * number
            sampling = Sampling(temperature=1.0, top_p=0.9, seed=own_seed)
            parent.children = [Branch() for _ in range(width)]
            grown.update({(name, i): child for i, child in enumerate(parent.children)})
            commands.append(Fork(name, parent.capsule, (b"",) * width, limits, sampling))
        _run(engine, commands, grown)
        level = list(grown.values())
    return root, engine


def _run(
    engine: "Engine", commands: Sequence["Command"], branches: Mapping[tuple[str, int], Branch]
) -> None:
    """Run `commands` to their end; add their tokens to `branches`, by request and index.

    Raises the engine's errors.
    """
    for command in commands:
        engine.submit(command, "tree")
    while engine.has_work:
        for frame in engine.step().frames.values():
            for update in frame.updates:
                if update.error is not None:
                    raise from_wire(update.error)
                branch = branches[update.request, update.branch]
                branch.tokens.extend(update.tokens)
                branch.capsule = update.capsule or branch.capsule


def draw(root: Branch, tokenizer: "Tokenizer") -> Tree:
    """The tree for a terminal: the prompt on top, each text below the one it continues."""
    tree = Tree(Text(tokenizer.decode(root.tokens), style="bold"), guide_style="green")
    todo = [(tree, root)]
    while todo:
        above, branch = todo.pop()
        for child in branch.children:
            text = Text(repr(tokenizer.decode(child.tokens))[1:-1])
            todo.append((above.add(text), child))
    return tree


def texts(root: Branch, tokenizer: "Tokenizer") -> list[dict[str, Any]]:
    """The prompt and every text, each with the number of the one that it continues; parents come first."""
    found: list[dict[str, Any]] = []
    todo: list[tuple[int | None, Branch]] = [(None, root)]
    while todo:
        parent, branch = todo.pop()
        number = len(found)
        text = tokenizer.decode(branch.tokens)
        found.append(
            {"number": number, "parent": parent, "text": text, "tokens": len(branch.tokens)}
        )
        todo += [(number, child) for child in reversed(branch.children)]
    return found
