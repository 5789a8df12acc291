"""Options of modelled fleets, which every command that replays a trace on them has."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mallee.cli.options import (
    DEFAULT_TIMING,
    BlockSizeOption,
    IdTokensOption,
    KindOption,
    RequestsOption,
    SeedOption,
    SessionsOption,
    SpeedupOption,
    TimingOption,
    above_0,
    count,
)

if TYPE_CHECKING:
    from mallee.mocker.replay.config import ReplayConfig
    from mallee.traces.workload import Workload


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetOptions:
    """The workload, how it arrives, and the engines, as options of a command line."""

    kind: KindOption = "auto"
    id_tokens: IdTokensOption = None
    requests: RequestsOption = None
    sessions_per_hour: SessionsOption = 240.0
    speedup: SpeedupOption = 1.0
    concurrency: Annotated[
        int | None,
        typer.Option(help="Keep so many requests under way; arrival times don't count."),
    ] = None
    open_loop: Annotated[
        bool,
        typer.Option("--open-loop", help="Requests arrive by the clock, and wait for no others."),
    ] = False
    gateways: Annotated[int, typer.Option(help="Router replicas.")] = 1
    engine: Annotated[str, typer.Option(help="Whose rules workers follow: mallee or vllm.")] = (
        "mallee"
    )
    timing: TimingOption = DEFAULT_TIMING
    block_size: BlockSizeOption = None
    max_rows: Annotated[int, typer.Option(help="Branches that a worker runs at once.")] = 256
    engines_per_device: Annotated[
        int, typer.Option(help="So many engines share each device by turns.")
    ] = 1
    slice_ms: Annotated[
        float, typer.Option(help="Slice of a shared device while other engines wait.")
    ] = 2.0
    faults: Annotated[
        Path | None, typer.Option(help="JSON list of faults, each with its time.")
    ] = None
    slo_ttft_ms: Annotated[
        float, typer.Option(help="Longest time to first token that is in time.")
    ] = 2000.0
    slo_itl_ms: Annotated[
        float, typer.Option(help="Longest mean gap between tokens that is in time.")
    ] = 50.0
    seed: SeedOption = 0

    def config(self) -> "ReplayConfig":
        """The settings of a replay, but for engines, policy and memory. Raises ConfigError."""
        from mallee.mocker.device import DeviceConfig
        from mallee.mocker.replay.config import ReplayConfig
        from mallee.mocker.replay.fleet.faults import load_faults

        return ReplayConfig(
            block_size=count("block-size", self.block_size) or 0,
            timing=self.timing,
            speedup=self.speedup,
            concurrency=count("concurrency", self.concurrency) or 0,
            keeps_order=not self.open_loop,
            gateways=self.gateways,
            engine=self.engine,
            max_rows=self.max_rows,
            device=DeviceConfig(self.engines_per_device, above_0("slice-ms", self.slice_ms) * 1e-3),
            faults=() if self.faults is None else load_faults(self.faults),
            slo_ttft_s=above_0("slo-ttft-ms", self.slo_ttft_ms) * 1e-3,
            slo_itl_s=above_0("slo-itl-ms", self.slo_itl_ms) * 1e-3,
        ).validate()

    def reading(self, trace: Path, seed: int) -> "Callable[[], Workload]":
        """A function that reads the workload. Raises ConfigError for numbers below 1."""
        from mallee.traces.read import read_workload

        return partial(
            read_workload,
            trace,
            kind=self.kind,
            seed=seed,
            limit=count("requests", self.requests),
            id_tokens=count("id-tokens", self.id_tokens),
            sessions_per_hour=self.sessions_per_hour,
        )
