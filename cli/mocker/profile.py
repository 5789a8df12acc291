"""`mallee profile`: what a model's forward passes take on this machine, as a timing for replays."""

import gc
import os
import platform
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from mallee.cli.options import check_file, require_serve_extra
from mallee.protocol.errors import ConfigError

if TYPE_CHECKING:
    from mallee.protocol.model import ModelSpec

BLOCK_SIZE = 16


def add_to(cli: typer.Typer) -> None:
    """Add the command."""
    cli.command()(profile)


def profile(
    model: Annotated[str | None, typer.Argument(help="As --model of `mallee serve`.")] = None,
    out: Annotated[
        Path | None,
        typer.Option("--to", help="The file to write; `mallee replay --timing` reads it."),
    ] = None,
    quick: Annotated[bool, typer.Option(help="A few points only.")] = False,
    fits: Annotated[
        bool, typer.Option(help="Print the profiles that come with Mallee, and their errors.")
    ] = False,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; all by default.")] = None,
    dtype: Annotated[str, typer.Option(help="auto, bfloat16 or float32.")] = "auto",
    device: Annotated[str, typer.Option(help="cpu, or cuda where there is one.")] = "cpu",
    kv_tokens: Annotated[
        int, typer.Option(min=1024, help="Tokens of KV memory: as many rows and contexts fit.")
    ] = 49152,
    max_rows: Annotated[int, typer.Option(min=2, help="Rows to measure decodes up to.")] = 32,
    max_context: Annotated[int, typer.Option(min=64, help="Tokens to measure up to.")] = 1024,
    max_step_tokens: Annotated[
        int, typer.Option(min=32, help="Tokens of a chunk to measure prefills up to.")
    ] = 512,
) -> None:
    """Measure what a model's passes take on this machine, for `mallee replay --timing FILE`."""
    from mallee.mocker.timing.profiles import fits_table

    if fits:
        sys.stdout.write("\n".join(fits_table()) + "\n")
        return
    if model is None or out is None:
        raise ConfigError("profile: give MODEL and --to FILE (or --fits)")
    _check_target(out)
    require_serve_extra()
    from mallee.mocker.timing.measure import Profiler, Sweep
    from mallee.worker.model.loading.source import resolve_model
    from mallee.worker.model.runner import load

    console = Console(stderr=True)
    threads = threads or os.cpu_count() or 1
    with console.status(f"loading {model} ..."):
        forward = load(
            resolve_model(model),
            num_blocks=kv_tokens // BLOCK_SIZE,
            block_size=BLOCK_SIZE,
            dtype=dtype,
            device=device,
            threads=threads,
        )
    gc.collect()
    gc.freeze()  # as workers do: a full collection would fall into a step
    spec = forward.spec
    wanted = Sweep.quick() if quick else Sweep.up_to(max_rows, max_context, max_step_tokens)
    sweep = wanted.fitted_to(spec.max_model_len, forward.num_blocks, BLOCK_SIZE)
    with console.status("measuring ..."):

        def report(line: str) -> None:
            console.print(f"[dim]{line}[/]", highlight=False)

        conditions: dict[str, str | int | float] = {
            **_about(spec, device),
            "threads": threads,
            "block_size": BLOCK_SIZE,
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        }
        found = Profiler(forward, sweep, report=report).measure(conditions)
    found.save(out)
    console.print(f"wrote {out}: jitter {found.jitter:.3f}", highlight=False)


def _check_target(out: Path) -> None:
    """Raises ConfigError before minutes of work if a profile can't be written to `out`."""
    if out.suffix == ".npz":
        raise ConfigError(f"--to {out}: a profile is JSON; .npz is Dynamo's form")
    if not out.parent.is_dir():
        raise ConfigError(f"--to {out}: there is no folder {out.parent}")
    check_file(out)


def _about(spec: "ModelSpec", device: str) -> dict[str, str]:
    """The model and its arithmetic, as a profile's file names them."""
    dtypes = {2: "bfloat16", 4: "float32"}
    return {
        "model": spec.name,
        "fingerprint": spec.fingerprint,
        "device": device,
        "dtype": dtypes.get(spec.dtype_nbytes, str(spec.dtype_nbytes)),
    }
