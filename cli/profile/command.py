"""`mallee profile`: what a model's forward passes take on this machine, as a timing for replays."""

import asyncio
import gc
import os
import platform
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer
from rich.console import Console

import mallee
from mallee.cli.options import JsonOption, check_file, require_serve_extra, version_of
from mallee.cli.output import answer, print_json
from mallee.protocol.errors import ConfigError

if TYPE_CHECKING:
    from mallee.mocker.measure import Sweep
    from mallee.mocker.timing.files import TimingFile
    from mallee.protocol.model import ModelSpec
    from mallee.worker.model.runner import TorchForward

BLOCK_SIZE = 16
MAX_NOISE = 0.25  # beyond it one time in ten says nothing
MAX_BUSY_SHARE = 0.25  # of the cores
_REMEDY = "stop what else runs on this machine, or give --force to save the times as they are"

Conditions: TypeAlias = dict[str, str | int | float]


def profile(
    model: Annotated[
        str | None,
        typer.Argument(
            help="As --model of `mallee serve`; with --random-weights a shape, with --engine vllm the URL of"
            " a server."
        ),
    ] = None,
    engine: Annotated[
        str,
        typer.Option(help="mallee: ours, here. vllm: a server that runs, from outside over HTTP."),
    ] = "mallee",
    out: Annotated[
        Path | None,
        typer.Option("--to", help="The file to write; `mallee replay --timing` reads it."),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Record the steps of an engine, phase by phase, for ui.perfetto.dev: the file to write."
        ),
    ] = None,
    random_weights: Annotated[
        bool,
        typer.Option(
            help="Draw the weights: MODEL is a folder with a config.json, or llama-3.1-8b, and nothing is"
            " downloaded."
        ),
    ] = False,
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
    force: Annotated[
        bool, typer.Option(help="Save also what a busy machine measured; the file says how busy.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Measure what a model's passes take on this machine, for `mallee replay --timing FILE`.

    With --trace FILE, record an engine's steps instead, or as well.

    Example: mallee profile smollm2 --quick --to cpu.json

    Example: mallee profile http://localhost:8000 --engine vllm --to vllm.json

    Example: mallee profile llama-3.1-8b --random-weights --device cuda --kv-tokens 262144 --to gpu.json
    """
    from mallee.mocker.timing.profiles import fits_table, fitted

    if fits:
        answer(fitted(), "\n".join(fits_table()), as_json=as_json)
        return
    if model is None or (out is None and trace is None):
        raise ConfigError("profile: give MODEL and --to FILE or --trace FILE (or --fits)")
    if out is not None and out.suffix == ".npz":
        raise ConfigError(f"--to {out}: a profile is JSON; .npz is Dynamo's form")
    for option, target in (("--to", out), ("--trace", trace)):
        if target is not None:
            _check_target(option, target)
    from mallee.mocker.measure import Sweep

    console = Console(stderr=True)
    wanted = Sweep.quick() if quick else Sweep.up_to(max_rows, max_context, max_step_tokens)
    if engine == "vllm":
        if out is None or trace is not None or random_weights:
            raise ConfigError("--engine vllm: give --to FILE, without --trace or --random-weights")
        busy = _check_idle(force=force)
        # Its processes wake each other: single steps differ more than our engine's.
        wanted = replace(wanted, repeats=2 * wanted.repeats, steps=4 * wanted.steps)
        measured = asyncio.run(_measure_served(model, wanted, busy, console))
        written = {"profile": _save(measured, out, console, force=force)}
        if as_json:
            print_json({"conditions": measured.conditions, **written})
        return
    if engine != "mallee":
        raise ConfigError(f"--engine {engine}: give mallee or vllm")
    require_serve_extra()
    busy = _check_idle(force=force or out is None)
    threads = threads or os.cpu_count() or 1
    load = _drawn if random_weights else _stored
    with console.status(f"loading {model} ..."):
        forward = load(model, kv_tokens, dtype, device, threads)
    gc.collect()
    gc.freeze()  # as workers do: a full collection would fall into a step
    conditions: Conditions = {
        **_about(forward.spec, device),
        "weights": "random" if random_weights else "stored",
        "threads": threads,
        "block_size": BLOCK_SIZE,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "busy_cores": busy,
    }
    written = {}
    if trace is not None:
        sizes = {"max_context": max_context, "max_rows": max_rows}
        sizes["max_step_tokens"] = max_step_tokens
        with console.status("recording steps ..."):
            num_steps = _record(forward, trace, conditions, sizes, console)
        written["trace"] = {"file": str(trace), "steps": num_steps}
    if out is not None:
        timed = _measure(forward, wanted, conditions=conditions, console=console)
        written["profile"] = _save(timed, out, console, force=force)
    if as_json:
        print_json({"conditions": conditions, **written})


def _stored(model: str, kv_tokens: int, dtype: str, device: str, threads: int) -> "TorchForward":
    """The model as it is stored."""
    from mallee.worker.model.backend import check_device
    from mallee.worker.model.loading.source import resolve_model
    from mallee.worker.model.runner import load

    check_device(device)  # before anything is downloaded
    return load(
        resolve_model(model),
        num_blocks=kv_tokens // BLOCK_SIZE,
        block_size=BLOCK_SIZE,
        dtype=dtype,
        device=device,
        threads=threads,
    )


def _drawn(model: str, kv_tokens: int, dtype: str, device: str, threads: int) -> "TorchForward":
    """A model of that shape with random weights."""
    import torch

    from mallee.testing.random_weights import draw_weights, read_shape
    from mallee.worker.model.backend import check_device
    from mallee.worker.model.config import model_spec
    from mallee.worker.model.graphs.decode import GraphOptions
    from mallee.worker.model.loading.config_json import parse_config
    from mallee.worker.model.runner import TorchForward, resolve_dtype

    check_device(device)
    torch.set_num_threads(threads)
    config = parse_config(read_shape(model))
    dtype = resolve_dtype(dtype, config, device)
    weights = draw_weights(config, dtype=getattr(torch, dtype), device=device)
    spec = model_spec(
        config,
        name=Path(model).name,
        weights_digest="random",
        dtype=dtype,
        max_model_len=kv_tokens // BLOCK_SIZE * BLOCK_SIZE,
    )
    return TorchForward(
        *(config, weights, spec),
        num_blocks=kv_tokens // BLOCK_SIZE,
        block_size=BLOCK_SIZE,
        graphs=GraphOptions(),  # as a worker has them
    )


def wait_of(device: str) -> Callable[[], None]:
    """Waits until the device has done all that was launched; a CPU has."""
    if not device.startswith("cuda"):
        return lambda: None
    import torch

    return partial(torch.cuda.synchronize, device)


def _beside_host(forward: "TorchForward") -> "TorchForward | None":
    """It again, if the engine launches passes ahead there."""
    return forward if forward.is_beside_host else None


def _record(
    forward: "TorchForward",
    trace: Path,
    conditions: Conditions,
    sizes: dict[str, int],
    console: Console,
) -> int:
    """Write the trace of an engine's steps, and print the time of each phase. Returns their number."""
    from mallee.cli.profile.steps import record_steps, save_trace, summary
    from mallee.mocker.measure import warm_up

    warm_up(forward)
    record = partial(
        record_steps, forward, device=_beside_host(forward), clock=time.perf_counter, **sizes
    )
    record(seed=1)  # kernels are made for its shapes
    steps = record()
    save_trace(trace, steps, conditions)
    console.print("\n".join(summary(steps)), highlight=False)
    console.print(f"wrote {trace}: {len(steps)} steps", highlight=False)
    return len(steps)


def _measure(
    forward: "TorchForward", wanted: "Sweep", *, conditions: Conditions, console: Console
) -> "TimingFile":
    """The times of passes."""
    from mallee.mocker.measure import Profiler

    sweep = wanted.fitted_to(forward.spec.max_model_len, forward.num_blocks, BLOCK_SIZE)
    profiler = Profiler(
        forward,
        sweep,
        device=_beside_host(forward),
        wait=wait_of(str(conditions["device"])),
        report=partial(_report, console),
    )
    with console.status("measuring ..."):
        return profiler.measure(conditions)


async def _measure_served(url: str, wanted: "Sweep", busy: float, console: Console) -> "TimingFile":
    """The same of the server at `url`."""
    import httpx

    from mallee.cli.profile.vllm import ServedProfiler, served

    limits = httpx.Limits(max_connections=None)  # httpx's own 100 would cut decodes of more rows
    async with httpx.AsyncClient(
        base_url=url, timeout=600.0, trust_env=False, limits=limits
    ) as client:
        server = await served(client)
        sweep = wanted.fitted_to(server.max_model_len, server.num_blocks, server.block_size)
        conditions: Conditions = {
            "engine": f"vllm {server.version}",
            "model": server.model,
            "url": url,
            "block_size": server.block_size,
            "kv_tokens": server.num_blocks * server.block_size,
            "mallee": mallee.__version__,
            "busy_cores": busy,
        }
        profiler = ServedProfiler(client, server, sweep, report=partial(_report, console))
        with console.status("measuring ..."):
            return await profiler.measure(conditions)


def _report(console: Console, line: str) -> None:
    console.print(f"[dim]{line}[/]", highlight=False)


def _save(found: "TimingFile", out: Path, console: Console, *, force: bool) -> dict[str, Any]:
    """Write a timing, and print how far to trust it. Raises ConfigError for a noisy one, unless forced."""
    noise = float(found.conditions["noise"])
    told = f"one time in ten is more than {noise:.0%} off the median of its point"
    if noise > MAX_NOISE and not force:
        raise ConfigError(f"{out} is not written: {told}; {_REMEDY}")
    found.save(out)
    console.print(f"wrote {out}: jitter {found.jitter:.3f}; {told}", highlight=False)
    return {"file": str(out), "jitter": found.jitter, "noise": noise}


def _check_idle(*, force: bool) -> float:
    """The cores that others use now. Raises ConfigError if they are too many, unless forced."""
    from mallee.mocker.measure import busy_cores

    busy, cores = busy_cores(), os.cpu_count() or 1
    if busy > MAX_BUSY_SHARE * cores and not force:
        raise ConfigError(f"other work uses {busy:.1f} of {cores} cores here; {_REMEDY}")
    return busy


def _check_target(option: str, target: Path) -> None:
    """Raises ConfigError before minutes of work if `target` can't be written to."""
    if not target.parent.is_dir():
        raise ConfigError(f"{option} {target}: there is no folder {target.parent}")
    check_file(target)


def _about(spec: "ModelSpec", device: str) -> dict[str, str]:
    """The model, its arithmetic and what computes it, as a profile's file names them."""
    import torch

    dtypes = {2: "bfloat16", 4: "float32"}
    found = {
        "model": spec.name,
        "fingerprint": spec.fingerprint,
        "device": device,
        "dtype": dtypes.get(spec.dtype_nbytes, str(spec.dtype_nbytes)),
        "torch": str(torch.__version__),
        "mallee": mallee.__version__,
    }
    if device.startswith("cuda"):
        found["device_name"] = torch.cuda.get_device_name(device)
        found["cuda"] = str(torch.version.cuda)
        found["flashinfer"] = version_of("flashinfer-python") or "none"
    return found
