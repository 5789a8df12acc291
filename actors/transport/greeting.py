"""The greeting of a connection: each end proves that it knows the app's secret, which never crosses.

The host sends a challenge, the gateway answers with its name and a proof (an HMAC over both nonces),
the host with a proof of its own. So a lease with a false address gets neither secret nor prompts.
"""

import hmac
import secrets
from pathlib import Path
from typing import Final, Literal, TypeAlias

import msgspec

from mallee.protocol.codec import Decoder, encode
from mallee.protocol.errors import ConfigError

VERSION = 1
NONCE_NBYTES = 32
MIN_SECRET_NBYTES = 16
MAX_NAME_CHARS = 256

Role: TypeAlias = Literal["gateway", "host"]


class Secret:
    """The app's secret; never shown."""

    __slots__ = ("_key",)

    def __init__(self, key: bytes) -> None:
        """Raises ConfigError if it is too short to be one."""
        if len(key) < MIN_SECRET_NBYTES:
            raise ConfigError(
                f"a secret of {len(key)} bytes: give {MIN_SECRET_NBYTES} at least",
                nbytes=len(key),
            )
        self._key = key

    def __repr__(self) -> str:
        return "Secret(...)"

    def __reduce__(self) -> str | tuple[object, ...]:
        raise TypeError("a secret is not sent along: each process asks for it")

    def derived(self, use: bytes) -> bytes:
        """A key for another use, from which nobody gets back to the secret."""
        return hmac.digest(self._key, b"mallee for " + use, "sha256")

    def proof(self, role: Role, name: str, challenge: bytes, nonce: bytes) -> bytes:
        """The proof of the end `role` of the connection of gateway `name`."""
        message = b"\0".join((b"mallee", role.encode(), challenge, nonce, name.encode()))
        return hmac.digest(self._key, message, "sha256")


def read_secret(file: Path) -> Secret:
    """The secret that is alone in `file`. Raises ConfigError."""
    try:
        return Secret(file.expanduser().read_bytes().strip())
    except OSError as error:
        raise ConfigError(f"links.secret_file={str(file)!r}: {error.strerror}") from error


def new_secret() -> bytes:
    """Bytes for a secret that did not exist before."""
    return secrets.token_hex(32).encode()


class Challenge(msgspec.Struct, frozen=True, array_like=True):
    """First message of a host."""

    version: int
    nonce: bytes


class Hello(msgspec.Struct, frozen=True, array_like=True):
    """First message of a gateway, in answer."""

    version: int
    gateway: str
    nonce: bytes
    proof: bytes


class Welcome(msgspec.Struct, frozen=True, array_like=True):
    """The host's answer to a right one; reports follow."""

    proof: bytes


_decode_challenge: Final = Decoder(Challenge, "a challenge")
_decode_hello: Final = Decoder(Hello, "a greeting")
_decode_welcome: Final = Decoder(Welcome, "a welcome")


class HostGreeting:
    """The host's side of one greeting."""

    def __init__(self, secret: Secret) -> None:
        self._secret = secret
        self._nonce = secrets.token_bytes(NONCE_NBYTES)

    def challenge(self) -> bytes:
        return encode(Challenge(VERSION, self._nonce))

    def take(self, raw: bytes) -> tuple[str, bytes]:
        """The gateway's name, and the welcome for it. Raises CodecError, ConfigError."""
        hello = _decode_hello(raw)
        _check(hello.version, hello.nonce)
        if not 0 < len(hello.gateway) <= MAX_NAME_CHARS:
            raise ConfigError("a gateway has a name of 1 to 256 characters")
        parts = hello.gateway, self._nonce, hello.nonce
        if not hmac.compare_digest(hello.proof, self._secret.proof("gateway", *parts)):
            raise ConfigError("it has another secret")
        return hello.gateway, encode(Welcome(self._secret.proof("host", *parts)))


class GatewayGreeting:
    """The gateway's side of one greeting."""

    def __init__(self, secret: Secret, gateway: str) -> None:
        self._secret = secret
        self._gateway = gateway
        self._nonce = secrets.token_bytes(NONCE_NBYTES)
        self._challenge: bytes | None = None

    def take(self, raw: bytes) -> bytes | None:
        """The answer to a challenge; None: it was a right welcome. Raises CodecError, ConfigError."""
        if self._challenge is None:
            challenge = _decode_challenge(raw)
            _check(challenge.version, challenge.nonce)
            self._challenge = challenge.nonce
            proof = self._secret.proof("gateway", self._gateway, self._challenge, self._nonce)
            return encode(Hello(VERSION, self._gateway, self._nonce, proof))
        proof = self._secret.proof("host", self._gateway, self._challenge, self._nonce)
        if not hmac.compare_digest(_decode_welcome(raw).proof, proof):
            raise ConfigError("it has another secret")
        return None


def _check(version: int, nonce: bytes) -> None:
    if version != VERSION:
        raise ConfigError(f"it speaks version {version} of the protocol, not {VERSION}")
    if len(nonce) != NONCE_NBYTES:
        raise ConfigError(f"a nonce of {len(nonce)} bytes, not {NONCE_NBYTES}")
