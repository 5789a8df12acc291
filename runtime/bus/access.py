"""Access to a NATS broker: where it is, and the account that a client uses there."""

import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import urlsplit

from mallee.protocol.errors import ConfigError
from mallee.protocol.subjects import BusRole
from mallee.runtime.config import AppConfig, servers

_CREDS_MARK = "BEGIN NATS USER JWT"


@dataclass(frozen=True, slots=True)
class BrokerAccess:
    """A broker's URL, without credentials, and the account to use. Secrets show in no repr."""

    url: str
    """Of one server, or of several of a cluster with commas between them."""
    login: str | None = field(default=None, repr=False)
    """`user:password`, or a token."""
    creds_file: str | None = None
    """A `.creds` file of NATS, in place of a login."""
    source: str | None = None
    """Setting and file that the account comes from, for messages."""
    ca: str | None = None
    """PEM file of the authority that signs the broker's certificate; by default the system's."""

    @property
    def place(self) -> str:
        """Hosts and ports, for messages."""
        return ", ".join(urlsplit(url).netloc for url in servers(self.url))

    def options(self) -> dict[str, Any]:
        """Arguments of nats-py's `connect`. Raises ConfigError if the CA file can't be used."""
        options: dict[str, Any] = {"servers": servers(self.url)}
        if self.creds_file is not None:
            options["user_credentials"] = self.creds_file
        elif self.login is not None:
            user, colon, password = self.login.partition(":")
            options |= {"user": user, "password": password} if colon else {"token": self.login}
        if self.ca is not None:
            try:
                options["tls"] = ssl.create_default_context(cafile=self.ca)
            except OSError as error:  # SSLError is one
                raise ConfigError(f"nats_ca={self.ca!r}: {error.strerror or error}") from error
        return options


FindBroker: TypeAlias = BrokerAccess | Callable[[], Awaitable[BrokerAccess]]
"""The access, or a call that finds it out, for a broker that may move. The call raises ConnectionError."""


def operators_broker(config: AppConfig, role: BusRole) -> BrokerAccess:
    """Access to the broker of `nats_url`, by the credentials that their file has now.

    Raises ConfigError if the file can't be used; no message shows what is in it.
    """
    assert config.nats_url is not None, "without a broker of the operator's there is one of ours"
    setting, file = "nats_credentials", config.nats_credentials
    if role == "worker" and config.nats_worker_credentials is not None:
        setting, file = "nats_worker_credentials", config.nats_worker_credentials
    if file is None:
        return BrokerAccess(config.nats_url, ca=config.nats_ca)
    source, path = f"{setting}={file!r}", Path(file).expanduser()
    text = _read(source, path)
    if _CREDS_MARK not in text:
        return BrokerAccess(config.nats_url, login=text, source=source, ca=config.nats_ca)
    if find_spec("nkeys") is None:
        raise ConfigError(
            f"{source} is a .creds file: run `pip install 'nats-py[nkeys]'` to use it"
        )
    return BrokerAccess(config.nats_url, creds_file=str(path), source=source, ca=config.nats_ca)


def _read(source: str, path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        cause = error.strerror if isinstance(error, OSError) else "no text"
        raise ConfigError(f"{source}: {cause}") from None
    if not text or (len(text.splitlines()) > 1 and _CREDS_MARK not in text):
        raise ConfigError(f"{source}: give one line, user:password or a token, or a .creds file")
    return text
