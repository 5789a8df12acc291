"""A live fleet's settings in a replay: it honours some and refuses some; the others have no meaning in it."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from mallee.cli.options import require_packages
from mallee.cli.settings import make_config
from mallee.protocol.errors import ConfigError

if TYPE_CHECKING:
    from mallee.mocker.replay.config import ReplayConfig
    from mallee.runtime.config import AppConfig, Settings

_ENGINE: Final = ("prefix_cache", "eviction", "max_kept_share", "max_retained_share")
_SCHEDULER: Final = ("max_waiting", "ageing_steps", "watermark")
HONOURED: Final = {
    **{f"routing.{name}": f"routing.{name}" for name in ("temperature", "kv_events")},
    **{f"engine.{name}": f"engine.{name}" for name in _ENGINE},
    **{f"engine.{name}": name for name in ("block_size", "max_model_len")},
    **{f"scheduler.{name}": name for name in ("max_rows", "max_step_tokens")},
    **{f"scheduler.{name}": f"engine.scheduler.{name}" for name in _SCHEDULER},
    **{f"mock.{name}": f"timed.{name}" for name in ("speedup", "jitter", "startup_s")},
    "gateways": "gateways",
    "routing.policy": "policy",
    "routing.cost": "cost",
    "routing.expected_output_tokens": "cost.expected_output_tokens",
    "routing.timing": "prices",
    "routing.max_index_mb": "routing.max_index_nbytes",
    "engine.max_answer_capsules": "answer_capsules",
    "engine.max_below_mb": "engine.max_below_nbytes",
    "admission.busy_rows_ratio": "routing.busy_ratio",
    "admission.max_queued": "admission.max_waiting",
    "admission.max_queued_per_tenant": "admission.max_waiting_per_tenant",
    "admission.max_queue_wait_s": "admission.max_wait_s",
    "mock.seed": "seed",
    "mock.engines_per_device": "device.engines",
    "mock.device_slice_ms": "device.slice_s",
    "experimental.chunked": "engine.scheduler.chunked",
    "experimental.tree_attention": "shared_reads",
    "experimental.sync_bookings": "syncs_bookings",
}
"""By key: the field of `ReplayConfig` that takes the value."""
SIZES: Final = (
    *("workers", "mock.engines_per_worker", "engine.kind", "mock.timing", "engine.kv_tokens"),
    *("engine.kv_gib", "engine.host_gib", "engine.disk_path", "engine.disk_gib"),
    *("mock.host_kv_tokens", "mock.disk_kv_tokens", "links.lends"),
)
"""Honoured too, several together; those in bytes by the bytes that the timing has for a token."""
_SCALES: Final = {"max_index_mb": 1 << 20, "max_below_mb": 1 << 20, "device_slice_ms": 1e-3}
_NO_TENANTS: Final = "requests of a trace have no tenants: each session counts as one"
REFUSED: Final = {
    "engine.kv_dtype": "give --timing and --kv-tokens of an engine with that KV",
    "engine.device_share": "give --kv-tokens: the memory is not this machine's",
    "engine.speculation": "the texts of a replay have no tokens to draft",
    "engine.disk_tenant_gib": _NO_TENANTS,
    "engine.tier_gib_s": "moves of a replay take the tiers' own bandwidths",
    "admission.tenant_weights": _NO_TENANTS,
    "autoscaling.max_workers": "the number of engines of a replay is fixed: sweep over --engines",
}
"""By key: the reason and the remedy, for any value but the default."""
OF_OURS: Final = (
    *(f"engine.{name}" for name in (*_ENGINE, "max_model_len", "max_answer_capsules")),
    *("engine.max_below_mb", "scheduler.max_waiting", "scheduler.ageing_steps", "links.lends"),
    *("experimental.chunked", "experimental.tree_attention"),
)
"""Without a meaning for engines that follow vLLM's rules."""


class Settled(NamedTuple):
    """A replay by settings, the KV tokens of an engine if they say, and the keys without a meaning in it."""

    config: "ReplayConfig"
    kv_tokens: int | None = None
    idle: tuple[str, ...] = ()


def settled(
    file: Path | None,
    assignments: Sequence[str] | None,
    timing: str | None = None,
    *,
    unused: Collection[str] = (),
) -> Settled:
    """The replay of a fleet with these settings, on engines of `timing`, or of the one that they name.

    Without a file, settings that are not given are as `ReplayConfig` has them. Keys in `unused` have no
    meaning here either. Raises ConfigError naming a setting that is refused.
    """
    from mallee.mocker.replay.config import ReplayConfig

    config = ReplayConfig() if timing is None else ReplayConfig(timing=timing)
    if file is None and not assignments:
        return Settled(config)
    require_packages(("pydantic", "yaml"), "`pip install pydantic pyyaml` to read settings")
    app = make_config(file, assignments, {}, {} if file else {"engine.kind": "mock"})
    given, defaults = dict(_flat(app, only_set=True)), dict(_flat(type(app)(model=app.model)))
    if app.is_foreign:
        raise ConfigError(
            "engine.kind='vllm' can't be replayed by its settings: give --engine vllm, --timing and"
            " --kv-tokens"
        )
    for key, why in REFUSED.items():
        if given.get(key) not in (None, defaults[key]):
            raise ConfigError(f"{key}={given[key]!r} can't be replayed: {why}")
    applied = given if file is None else dict(_flat(app))
    if timing is None:
        named = applied.get("mock.timing") if app.is_mocked else app.routing.timing
        config = replace(config, timing=named or config.timing)
    for key, path in HONOURED.items():
        if (value := applied.get(key)) is not None:
            scale = _SCALES.get(key.partition(".")[2])
            config = _with(config, path, value if scale is None else value * scale)
    if applied.keys() & {"workers", "mock.engines_per_worker"}:
        config = replace(config, engines=app.num_workers)
    known = {*HONOURED, *SIZES, *REFUSED, "model"} - {*unused}
    return _sized(config, app, applied, tuple(key for key in given if key not in known))


def _sized(
    config: "ReplayConfig", app: "AppConfig", applied: dict[str, Any], idle: tuple[str, ...]
) -> Settled:
    """`config` with the tiers and the loans of `app`, and its KV memory, as far as they are `applied`."""
    from mallee.mocker.tiers import TierConfig
    from mallee.mocker.timing.profiles import kv_room

    engine, mock = app.engine, app.mock

    def tokens(key: str, nbytes: float) -> int:
        each = kv_room(str(config.timing)).token_nbytes
        if not each:
            raise ConfigError(
                f"{key}: the timing {config.timing} does not say what a token's KV takes; give tokens"
            )
        return int(nbytes) // each

    kv_tokens: int | None = None
    if app.is_mocked or engine.kv_tokens is not None:
        if "engine.kv_tokens" in applied:
            kv_tokens = (app.num_blocks or 0) * engine.block_size
    elif app.kv_nbytes is not None and "engine.kv_gib" in applied:
        kv_tokens = tokens("engine.kv_gib", app.kv_nbytes)
    host, disk = mock.host_kv_tokens, mock.disk_kv_tokens
    host = tokens("engine.host_gib", engine.host_gib * 2**30) if engine.host_gib else host
    disk = tokens("engine.disk_gib", engine.disk_gib * 2**30) if engine.disk_path else disk
    if host or disk:
        config = replace(config, tiers=TierConfig(host, disk))
    # Live mocked engines lend nothing.
    lends = applied.get("links.lends", False) and not app.is_mocked and config.engines > 1
    return Settled(replace(config, can_migrate=lends), kv_tokens, idle)


def _with(owner: Any, path: str, value: object) -> Any:
    """`owner` with the field at `path` replaced, or, if that is a mapping, with more in it."""
    name, _, rest = path.partition(".")
    if isinstance(owner, dict):
        return {**owner, name: value}
    old = getattr(owner, name)
    if isinstance(value, dict):
        value = {**old, **value}
    return replace(owner, **{name: _with(old, rest, value) if rest else value})


def _flat(
    settings: "Settings", prefix: str = "", *, only_set: bool = False
) -> Iterator[tuple[str, Any]]:
    """Every setting by its dotted key, or every one that was set."""
    from mallee.runtime.config import sections  # pydantic

    inside = sections(type(settings))
    for name, value in settings:
        if only_set and name not in settings.model_fields_set:
            continue
        if name in inside:
            yield from _flat(value, f"{prefix}{name}.", only_set=only_set)
        else:
            yield prefix + name, value
