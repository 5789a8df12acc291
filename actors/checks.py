"""Looks at whether settings can be served from this machine, before anything is started."""

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Final, get_args

from mallee.actors.build import check_links, check_model
from mallee.actors.foreign.arguments import argument_faults, known_arguments
from mallee.protocol.errors import ConfigError, MalleeError
from mallee.protocol.subjects import BusRole
from mallee.runtime.bus.access import operators_broker
from mallee.runtime.config import AppConfig
from mallee.runtime.telemetry.tracing.provider import check_exporters

_DEVICES: Final = Path("/dev")


def check_files(config: AppConfig) -> None:
    """Raises ConfigError with all faults of files, folders, packages and arguments that are named."""
    arguments = argument_faults(config.engine.vllm, known_arguments())
    if faults := [*arguments, *faults_of((*looks(config), partial(check_model, config)))]:
        raise ConfigError("; ".join(faults))


def faults_of(looks: Iterable[Callable[[], object]]) -> Iterator[str]:
    """The error of each call that raises MalleeError."""
    for look in looks:
        try:
            look()
        except MalleeError as error:
            yield str(error)


def looks(config: AppConfig) -> Iterator[Callable[[], object]]:
    """Calls that each raise MalleeError for a fault: of all but the model, which may have to be fetched."""
    yield partial(check_links, config)
    yield check_exporters
    for role in get_args(BusRole) if config.nats_url is not None else ():
        yield partial(_check_broker, config, role)
    if config.is_mocked:
        from mallee.actors.mock.fleet import timing_of

        yield partial(timing_of, config)
    for key, folder in (
        ("engine.disk_path", config.engine.disk_path),
        ("recording.folder", config.recording.folder),
        ("imports.folder", config.imports.folder),
    ):
        if folder is not None and "://" not in folder:
            yield partial(_check_folder, key, folder)


def shortages(config: AppConfig, *, counts_gpus: bool = True) -> Iterator[str]:
    """Resources that workers ask for beyond those of this machine; with nats_url one of them may run here.

    `counts_gpus`: by their devices, of which MIG and WSL have others than Ray counts.
    """
    workers = 1 if config.nats_url is not None else config.workers
    is_counted = config.has_cuda or config.is_mocked or config.num_blocks is not None
    kv_gib = 0.0 if is_counted else (config.kv_nbytes or 0) / 2**30
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2**30
    gpus = len([*_DEVICES.glob("nvidia[0-9]*")])
    for what, asked, there, keys in (
        ("GiB for KV", kv_gib + config.engine.host_gib, memory, "engine.kv_gib and host_gib"),
        ("CPUs", config.ray.worker_cpus, os.cpu_count() or 1, "ray.worker_cpus"),
        ("GPUs", config.worker_gpus if counts_gpus else 0, gpus, "ray.worker_gpus"),
    ):
        if workers * asked > there:
            yield (
                f"{workers} workers ask for {workers * asked:g} {what} ({keys}), and this machine has"
                f" {there:g}: give less, fewer workers, or nats_url and more nodes"
            )


def _check_broker(config: AppConfig, role: BusRole) -> None:
    """Raises ConfigError if a file for the way to the broker can't be read."""
    operators_broker(config, role).options()


def _check_folder(key: str, folder: str) -> None:
    """Raises ConfigError if the folder is not there and can't be made, or can't be written."""
    path = Path(folder).expanduser()
    found = next(each for each in (path, *path.parents) if each.exists())
    try:  # root may write everywhere by its modes, and yet not into /proc
        tempfile.TemporaryFile(dir=found).close()
    except NotADirectoryError:
        raise ConfigError(f"{key}={folder!r}: {found} is no folder") from None
    except OSError as error:
        raise ConfigError(
            f"{key}={folder!r}: {found} can't be written by this user ({error.strerror})"
        ) from error
