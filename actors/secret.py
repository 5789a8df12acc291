"""The app's secret: of the operator's file, or Ray's, and then also in a file beside what outlives Ray.

Ray's store ends with Ray. Capsules on a disk and what gateways store outlive it, and their ids and scopes are
tagged by the secret.
"""

import logging
import secrets
from collections.abc import Callable
from errno import ENOENT
from pathlib import Path
from typing import TYPE_CHECKING

from mallee.gateway.access.scopes import Scopes
from mallee.protocol.errors import ConfigError, StorageFailed
from mallee.protocol.ids import Scope
from mallee.runtime.config import AppConfig
from mallee.runtime.transport.greeting import (
    MIN_SECRET_NBYTES,
    Secret,
    keep_secret,
    new_secret,
    read_secret,
)

if TYPE_CHECKING:
    from mallee.actors.cluster import RayStore

log = logging.getLogger(__name__)


def build_ids(secret: Secret, gateway: str = "") -> Scopes:
    """The ids of one of the gateways that share `secret`; without its name, to tell them apart only."""
    return Scopes(secret.derived(b"scopes"), draw=secrets.token_bytes, gateway=gateway)


def file_of(config: AppConfig) -> Path | None:
    """The file with the app's secret, beside the disk or else the store of our own broker.

    None: with neither, or with `links.secret_file`.
    """
    if config.links.secret_file is not None:
        return None
    if config.engine.disk_path is not None:
        return Path(config.disk_place("secret"))
    folder = config.store_folder
    return folder and folder / "secret"


def secret_remark(config: AppConfig) -> str | None:
    """A word where what gateways store outlives the secret that its ids are tagged by."""
    if config.nats_url is None or config.links.secret_file or file_of(config) is not None:
        return None
    return (
        "nats_url without links.secret_file: ids are tagged by a secret that Ray alone keeps, so what is"
        " stored at that NATS is unknown once Ray is started anew, and to other Ray clusters"
    )


def take_secret(
    config: AppConfig,
    store: "RayStore",
    app: str,
    *,
    has_disk: bool,
    is_one_node: Callable[[], bool],
) -> Secret:
    """The secret that gateways and workers share. Raises ConfigError.

    With a disk workers have it beside that, and gateways, whose node may have no such disk, come later.
    """
    if not has_disk and (remark := secret_remark(config)) is not None:
        log.warning(remark)
    if (given := config.links.secret_file) is not None:
        return read_secret(Path(given))
    file = file_of(config)
    has_disk = (
        has_disk or config.engine.disk_path is None
    )  # our broker is on the one node that there is
    may_make = file is None or (has_disk and is_one_node())
    return Secret(secret_of(store, app, file if has_disk else None, may_make=may_make))


def secret_of(
    store: "RayStore", app: str, file: Path | None = None, *, may_make: bool = True
) -> bytes:
    """The secret of `app`, which the first process that asks puts into the store. Raises ConfigError.

    A worker with a disk gives the `file` beside it: its content becomes the app's secret, or the app's its
    content. Without `may_make` the store or the file must have one already.
    """
    key, found, lack = f"secret:{app}", b"", "is missing, and another node may have it"
    if file is not None:
        try:
            if len(found := file.read_bytes().strip()) < MIN_SECRET_NBYTES:
                raise ConfigError(
                    f"{file} has {len(found)} bytes, no secret: put it back from a backup, or remove it"
                )
        except FileNotFoundError:
            pass
        except OSError as error:  # it may be there: another one must not take its place
            lack, may_make = f"can't be read: {error.strerror}", False
    if found or may_make:
        store.add(key, (found or new_secret()).hex())
    kept = bytes.fromhex(store.get(key) or "")
    if not kept:
        raise ConfigError(
            f"{file or 'the secret'}, which ids of what is kept are tagged by, {lack}: give"
            " links.secret_file, with the same content on every node"
        )
    if file is not None and not found:
        try:
            found = keep_secret(file, kept)
        except OSError as error:
            text = "%s can't be written, so nothing beside it is used when Ray starts anew: %s"
            log.error(text, file, error.strerror)
    if found not in (b"", kept):
        raise ConfigError(
            f"{file} is another secret than Ray keeps for the app {app!r}, so what is kept there would be"
            f" unknown: give links.secret_file={str(file)!r}, or start Ray anew"
        )
    return kept


def check_kept(config: AppConfig) -> None:
    """Raises StorageFailed if the secret is not beside the disk, where the next Ray would look for it."""
    if (file := file_of(config)) is not None and not file.exists():
        reason = "the secret that tags the ids of its capsules is missing"
        raise StorageFailed("open", str(file), ENOENT, reason)


def check_secret(config: AppConfig) -> None:
    """Raises ConfigError if capsules on the disk of this machine are tagged by a secret that is not given."""
    from mallee.worker.storage.files import owned_capsules

    path, beside = config.engine.disk_path, file_of(config)
    if path is None or "://" in path:
        return
    capsules = owned_capsules(Path(config.disk_place("")))
    there = f"engine.disk_path={path!r}: "
    remedy = "put it back from a backup, or give links.secret_file"
    if beside is not None and not beside.exists():
        if capsules:
            raise ConfigError(
                f"{there}{len(capsules)} capsules are there, and {beside}, which their ids are tagged by, is"
                f" missing: {remedy}"
            )
        return
    file = beside or Path(config.links.secret_file or "")
    ids = build_ids(read_secret(file, "engine.disk_path" if beside else "links.secret_file"))
    if others := [name for name, owner in capsules if not ids.belongs(name, Scope(owner))]:
        raise ConfigError(
            f"{there}{len(others)} of {len(capsules)} capsules there are tagged by another secret than"
            f" {file}, and nothing could name them: {remedy}"
        )
