"""Options of modelled fleets, which every command that replays a trace on them has."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.console import Console
from rich.markup import escape

from mallee.cli.mocker.preview import Preview, preview
from mallee.cli.mocker.settings import OF_OURS, settled
from mallee.cli.options import (
    BlockSizeOption,
    IdTokensOption,
    KindOption,
    RequestsOption,
    SessionsOption,
    above_0,
    at_least_0,
    count,
    kv_tokens_of,
)
from mallee.cli.settings import ConfigFile, SetOptions
from mallee.protocol.errors import ConfigError

if TYPE_CHECKING:
    from mallee.mocker.replay.config import ReplayConfig
    from mallee.traces.workload import Workload

SESSIONS_PER_HOUR: Final = 240.0


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetOptions:
    """The workload, how it arrives, and the engines, as options of a command line."""

    config_file: ConfigFile = None
    set_: SetOptions = None
    kind: KindOption = "auto"
    id_tokens: IdTokensOption = None
    requests: RequestsOption = None
    sessions_per_hour: SessionsOption = SESSIONS_PER_HOUR
    concurrency: Annotated[
        int | None,
        typer.Option(help="Keep so many requests under way; arrival times don't count."),
    ] = None
    open_loop: Annotated[
        bool,
        typer.Option("--open-loop", help="Requests arrive by the clock, and wait for no others."),
    ] = False
    gateways: Annotated[int | None, typer.Option(help="Router replicas; 1 by default.")] = None
    engine: Annotated[
        str | None, typer.Option(help="Whose rules workers follow: mallee (the default) or vllm.")
    ] = None
    block_size: BlockSizeOption = None
    max_tokens: Annotated[int | None, typer.Option(help="Cut answers to so many tokens.")] = None
    event_lag: Annotated[
        float, typer.Option(help="Milliseconds until a worker's events reach the routers.")
    ] = 0.0
    prefill_engines: Annotated[
        int | None, typer.Option(help="Of the engines, so many only compute prompts.")
    ] = None
    migrate: Annotated[
        bool, typer.Option(help="Workers pull KV from each other where that takes less time.")
    ] = False
    host_kv_tokens: Annotated[
        int | None, typer.Option(help="KV tokens in host memory, for each worker.")
    ] = None
    disk_kv_tokens: Annotated[
        int | None, typer.Option(help="KV tokens on disk, for each worker.")
    ] = None
    retain_s: Annotated[
        float, typer.Option(help="Seconds that sessions want their text retained after its use.")
    ] = 0.0
    kv_bytes_per_token: Annotated[
        int | None,
        typer.Option(
            help="Bytes of a token's KV, where KV moves; by default those of the timing's model."
        ),
    ] = None
    state_bytes: Annotated[
        int, typer.Option(help="Bytes of the states of a text, of a model with recurrent layers.")
    ] = 0
    link_gb_s: Annotated[
        float | None, typer.Option(help="GB/s of KV from worker to worker; 25 by default.")
    ] = None
    faults: Annotated[
        Path | None, typer.Option(help="JSON list of faults, each with its time.")
    ] = None
    slo_ttft_ms: Annotated[
        float, typer.Option(help="Longest time to first token that is in time.")
    ] = 2000.0
    slo_itl_ms: Annotated[
        float, typer.Option(help="Longest mean gap between tokens that is in time.")
    ] = 50.0
    seed: Annotated[
        int | None, typer.Option(min=0, help="Same seed, same results; 0 by default.")
    ] = None

    def replay_config(
        self, timing: str | None, kv_tokens: int | None, **own: object
    ) -> "ReplayConfig":
        """The replay of a fleet: by settings, over them by the options, over those by `own` but None.

        Raises ConfigError.
        """
        from mallee.mocker.replay.fleet.faults import load_faults

        config, room, _ = settled(self.config_file, self.set_, timing)
        given: dict[str, Any] = {
            **own,
            "block_size": count("block-size", self.block_size),
            "concurrency": count("concurrency", self.concurrency),
            "gateways": count("gateways", self.gateways),
            "max_requests": count("requests", self.requests),
            "max_output_tokens": count("max-tokens", self.max_tokens),
            "prefill_engines": count("prefill-engines", self.prefill_engines),
            "rules": self.engine,
            "seed": self.seed,
        }
        config = replace(
            config,
            **{name: value for name, value in given.items() if value is not None},
            keeps_order=not self.open_loop,
            event_lag_s=at_least_0("event-lag", self.event_lag) * 1e-3,
            can_migrate=self.migrate or (config.can_migrate and self.engine != "vllm"),
            state_nbytes=int(at_least_0("state-bytes", self.state_bytes)),
            retain_s=at_least_0("retain-s", self.retain_s),
            faults=() if self.faults is None else load_faults(self.faults),
            slo_ttft_s=above_0("slo-ttft-ms", self.slo_ttft_ms) * 1e-3,
            slo_itl_s=above_0("slo-itl-ms", self.slo_itl_ms) * 1e-3,
        )
        given_room = room if kv_tokens is None else kv_tokens
        kv_tokens = kv_tokens_of(str(config.timing), given_room, config.device.engines)
        return self._moving(replace(config, kv_tokens=kv_tokens)).validate()

    def _moving(self, config: "ReplayConfig") -> "ReplayConfig":
        """`config` with its tiers and links. Raises ConfigError if the bytes that move are not known."""
        from mallee.mocker.links import LinkConfig
        from mallee.mocker.tiers import TierConfig

        tiers, given = config.tiers or TierConfig(), (self.host_kv_tokens, self.disk_kv_tokens)
        names = ("host_tokens", "disk_tokens")
        known = {n: each for n, each in zip(names, given, strict=True) if each is not None}
        tiers = replace(tiers, **known)
        has_tiers = tiers != replace(tiers, host_tokens=0, disk_tokens=0)
        nbytes = _kv_bytes(
            str(config.timing),
            count("kv-bytes-per-token", self.kv_bytes_per_token),
            are_needed=has_tiers or bool(config.prefill_engines) or config.can_migrate,
        )
        link_gb_s = 25.0 if self.link_gb_s is None else above_0("link-gb-s", self.link_gb_s)
        return replace(
            config,
            tiers=replace(tiers, token_nbytes=nbytes) if has_tiers else None,
            link=LinkConfig(bytes_s=link_gb_s * 1e9, token_nbytes=nbytes),
        )

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

    def show(
        self,
        workload: "Workload",
        config: "ReplayConfig",
        *others: "ReplayConfig",
        swept: Sequence[str] = (),
    ) -> None:
        """Print the trace in a line on stderr, and what of the options has no effect in any replay of it.

        `swept`: settings that other options replace. Raises CodecError if the trace is no prefix tree.
        """
        console = Console(stderr=True, highlight=False, soft_wrap=True)
        with console.status("reading ..."):
            found = preview(workload)
        console.print(escape(found.line(config.speedup, config.concurrency)))
        if doubt := found.doubt(config.speedup, config.concurrency):
            console.print(f"[yellow]doubtful:[/] {doubt}")
        unused = (*swept, *(OF_OURS if config.rules == "vllm" else ()))
        if idle := settled(self.config_file, self.set_, unused=unused).idle:
            console.print(f"[yellow]no meaning in a replay:[/] {', '.join(idle)}")
        for line in self.idle(found, config):
            if all(line in self.idle(found, other) for other in others):
                console.print(f"[yellow]no effect:[/] {line}")

    def idle(self, found: "Preview", config: "ReplayConfig") -> "Iterator[str]":
        """Options that were given and change nothing, each with the reason."""
        kind, device = found.workload.kind, config.device
        moves = bool(config.prefill_engines or config.can_migrate)
        stores = config.tiers is not None or config.state_nbytes > 0
        if config.retain_s and not found.has_sessions:
            yield "--retain-s: the trace names no sessions"
        if self.link_gb_s is not None and not moves:
            yield "--link-gb-s: without --migrate or --prefill-engines no KV moves between workers"
        if self.kv_bytes_per_token is not None and not moves and not stores:
            yield "--kv-bytes-per-token: without --migrate, --prefill-engines or tiers no KV moves"
        if self.migrate and config.engines == 1:
            yield "--migrate: a single engine has none to pull from"
        if device.engines == 1 and device.slice_s != type(device)().slice_s:
            yield "mock.device_slice_ms: engines share no device without mock.engines_per_device"
        is_by_chance = "an hour" in found.workload.note
        if self.sessions_per_hour != SESSIONS_PER_HOUR and not is_by_chance:
            yield "--sessions-per-hour: the trace has arrival times"
        if self.open_loop and kind in ("mooncake", "azure"):
            yield "--open-loop: no request of the trace waits for another"
        if self.id_tokens is not None and kind in ("sessions", "trees", "weka"):
            yield f"--id-tokens: ids of such a trace stand for {found.workload.id_tokens} tokens"
        if config.speedup != 1.0 and config.concurrency:
            yield "--speedup: arrival times don't count with --concurrency"
        blind = config.policy in ("round_robin", "random", "least_loaded")
        if config.event_lag_s and (blind or not config.routing.kv_events):
            yield "--event-lag: the router looks at no events of the workers"


def _kv_bytes(timing: str, given: int | None, *, are_needed: bool) -> int:
    """Bytes of a token's KV: as given, or of the timing's model. Raises ConfigError."""
    from mallee.mocker.links import TOKEN_NBYTES
    from mallee.mocker.timing.profiles import kv_room

    found = given or kv_room(timing).token_nbytes
    if are_needed and not found:
        raise ConfigError(
            f"--timing {timing} does not say what a token's KV takes, and KV moves: give"
            " --kv-bytes-per-token"
        )
    return found or TOKEN_NBYTES
