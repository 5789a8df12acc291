"""`mallee doctor-model`: a checkpoint loaded by Mallee and by transformers, compared layer by layer."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mallee.cli.options import JsonOption, require_serve_extra
from mallee.cli.output import grid, print_json
from mallee.protocol.errors import ConfigError

if TYPE_CHECKING:
    from mallee.worker.model.config import ModelConfig
    from mallee.worker.model.parity.compare import Diagnosis, Difference

NUM_RANDOM_TOKENS = 24
_BLOCK_SIZE = 16
_SHOWN_KEYS = 8


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
    as_json: JsonOption = False,
) -> None:
    """Compare a model layer by layer with transformers; exit 1 and name the place if they differ.

    Example: mallee doctor-model smollm2 --dtype bfloat16
    """
    require_serve_extra()
    console = Console(stderr=as_json)
    compared = compare(console, path, dtype=dtype, prompt=prompt, num_steps=tokens)
    show(console, compared, layers)
    if as_json:
        print_json(summary(compared))
    if compared.diagnosis.first is not None:
        raise typer.Exit(1)


class Compared(NamedTuple):
    """A model that was compared; `products` are the routines that computed ours."""

    model: str
    diagnosis: "Diagnosis"
    products: str


def compare(
    console: Console, name: str, *, dtype: str, prompt: str | None, num_steps: int
) -> Compared:
    """Load the model twice and compute with both. Raises MalleeError."""
    from mallee.worker.model.loading.config_json import read_config
    from mallee.worker.model.loading.source import resolve_model
    from mallee.worker.model.parity.compare import examine, load_oracle
    from mallee.worker.model.runner import load, resolve_dtype

    folder = resolve_model(name)
    config = read_config(folder)
    if config.quantization is not None:
        console.print(f"weights of 8 bits, {escape(config.quantization.label)}")
    dtype = resolve_dtype(dtype, config, "cpu")
    tokens = _prompt(folder, config, prompt)
    length = len(tokens) + num_steps
    if length > config.max_positions:
        raise ConfigError(
            f"{len(tokens)} prompt tokens + {num_steps} steps > {config.max_positions} positions"
        )
    with console.status(f"loading {escape(str(folder))} twice ..."):
        num_blocks = -(-length // _BLOCK_SIZE)
        forward = load(
            folder,
            num_blocks=num_blocks,
            block_size=_BLOCK_SIZE,
            dtype=dtype,
            max_model_len=num_blocks * _BLOCK_SIZE,
        )
        oracle = load_oracle(folder, dtype)
    with console.status("computing ..."):
        diagnosis = examine(forward, oracle, tokens, num_steps=num_steps)
    return Compared(name, diagnosis, forward.decoder.weights.products)


def show(console: Console, compared: Compared, num_layers: int | None) -> None:
    diagnosis = compared.diagnosis
    console.print(_table(diagnosis, num_layers))
    console.print(f"products: {escape(compared.products)}")
    if diagnosis.first is None:
        console.print(f"[green]agrees[/] with transformers in {diagnosis.dtype}")
        return
    console.print(f"[red]{escape(str(diagnosis.first))}[/]")
    if diagnosis.first.scores is not None:
        console.print(_scores(diagnosis.first, diagnosis.first.scores))


def summary(compared: Compared) -> dict[str, Any]:
    """All sites and the first difference, JSON-able."""
    diagnosis = compared.diagnosis
    first = {} if diagnosis.first is None else diagnosis.first._asdict()
    first.pop("scores", None)
    return {
        "model": compared.model,
        "dtype": diagnosis.dtype,
        "products": compared.products,
        "prompt_tokens": diagnosis.num_prompt,
        "steps": len(diagnosis.tokens) - diagnosis.num_prompt,
        "agrees": diagnosis.first is None,
        "first_difference": first or None,
        "sites": [row._asdict() for row in diagnosis.sites],
    }


def _prompt(folder: Path, config: "ModelConfig", text: str | None) -> list[int]:
    """Raises ConfigError if the text can't be made tokens."""
    import numpy as np

    from mallee.api.text.tokenizer import Tokenizer

    if text is None:
        drawn = np.random.default_rng(0).integers(0, config.vocab_size, NUM_RANDOM_TOKENS)
        return [int(token) for token in drawn]
    tokens = Tokenizer.load(folder).encode(text, add_special_tokens=True)
    if not tokens:
        raise ConfigError("--prompt gives no tokens; write more, or leave it out")
    return tokens


def _table(diagnosis: "Diagnosis", num_layers: int | None) -> Table:
    num_steps = len(diagnosis.tokens) - diagnosis.num_prompt
    table = Table(
        title=f"ours - transformers, {diagnosis.dtype},"
        f" {diagnosis.num_prompt} prompt tokens and {num_steps} steps"
    )
    table.add_column("layer", justify="right")
    table.add_column("site")
    for name in ("max error", "mean error", "of tolerance"):
        table.add_column(name, justify="right")
    for row in diagnosis.sites:
        is_hidden = num_layers is not None and row.layer is not None and row.layer >= num_layers
        if is_hidden and row.of_tolerance <= 1:
            continue
        table.add_row(
            "" if row.layer is None else str(row.layer),
            row.site,
            f"{row.max_error:.2e}",
            f"{row.mean_error:.2e}",
            f"{row.of_tolerance:.0%}",
            style="red" if row.of_tolerance > 1 else None,
            end_section=row.site in ("embed", "output"),
        )
    return table


def _scores(first: "Difference", scores: tuple[list[float], list[float]]) -> Table:
    """The keys whose weights differ most."""
    import numpy as np

    ours, theirs = (np.array(side) for side in scores)
    keys = np.argsort(-np.abs(ours - theirs), kind="stable")[:_SHOWN_KEYS]
    rows = ((str(key), f"{ours[key]:.4f}", f"{theirs[key]:.4f}") for key in keys)
    head = ("key position", "ours", "transformers")
    title = f"attention weights of layer {first.layer}, head {first.head}"
    return grid(head, rows, right=head, title=title)
