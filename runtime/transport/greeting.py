"""The greeting of a connection: each end proves that it knows the app's secret, which never crosses.

The end that listens sends a challenge, the one that dialed answers with its name and a proof (an HMAC over
both nonces and its role), the first with a proof of its own. So a lease with a false address gets neither
secret nor prompts. The byte that the dialer sends first, before TLS, tells the kind of the connection, and
the proofs name it: one for commands is worth nothing on a connection for KV.
"""

import hmac
import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from mallee.protocol.codec import Decoder, encode
from mallee.protocol.errors import ConfigError

VERSION = 2
NONCE_NBYTES = 32
MIN_SECRET_NBYTES = 16
MAX_NAME_CHARS = 256


class Kind(NamedTuple):
    """A kind of connection: the byte that its dialer sends first, and its ends as proofs name them."""

    first: bytes
    dialer: str
    listener: str


COMMANDS: Final = Kind(b"c", "gateway", "host")
KV: Final = Kind(b"k", "kv client", "kv server")


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

    def proof(self, role: str, name: str, challenge: bytes, nonce: bytes) -> bytes:
        """The proof of the end `role` of the connection that `name` dialed."""
        message = b"\0".join((b"mallee", role.encode(), challenge, nonce, name.encode()))
        return hmac.digest(self._key, message, "sha256")


def read_secret(file: Path, what: str = "links.secret_file") -> Secret:
    """The secret that is alone in `file`, which errors call `what`. Raises ConfigError."""
    try:
        return Secret(file.expanduser().read_bytes().strip())
    except OSError as error:
        raise ConfigError(f"{what}={str(file)!r}: {error.strerror}") from error


def new_secret() -> bytes:
    """Bytes for a secret that did not exist before."""
    return secrets.token_hex(32).encode()


def keep_secret(file: Path, secret: bytes) -> bytes:
    """The secret that `file` has: `secret`, unless it had one. Only this user can read it. Raises OSError.

    Processes that call this at once get the same one: the file has all its bytes before it has its name,
    and the name is given once.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_name(f"{file.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as made:
            made.write(secret)
            made.flush()
            os.fsync(made.fileno())
        with suppress(FileExistsError):
            os.link(unfinished, file)
    finally:
        unfinished.unlink(missing_ok=True)
    folder = os.open(file.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
    return file.read_bytes().strip()


class Challenge(NamedTuple):
    """First message of the end that listens, once it knows the kind."""

    version: int
    nonce: bytes


class Hello(NamedTuple):
    """First message of the end that dialed, in answer; a right one is answered with a proof, too."""

    version: int
    name: str
    nonce: bytes
    proof: bytes


_decode_challenge: Final = Decoder(Challenge, "a challenge")
_decode_hello: Final = Decoder(Hello, "a greeting")
_decode_welcome: Final = Decoder(bytes, "a welcome")


class ListenerGreeting:
    """The side of one greeting that listens."""

    def __init__(self, secret: Secret, kind: Kind) -> None:
        self._secret = secret
        self._kind = kind
        self._nonce = secrets.token_bytes(NONCE_NBYTES)

    def challenge(self) -> bytes:
        return encode(Challenge(VERSION, self._nonce))

    def take(self, raw: bytes) -> tuple[str, bytes]:
        """The name of the other end, and the welcome for it. Raises CodecError, ConfigError."""
        hello = _decode_hello(raw)
        _check(hello.version, hello.nonce)
        if not 0 < len(hello.name) <= MAX_NAME_CHARS:
            raise ConfigError(
                f"a {self._kind.dialer} has a name of 1 to {MAX_NAME_CHARS} characters"
            )
        parts = hello.name, self._nonce, hello.nonce
        if not hmac.compare_digest(hello.proof, self._secret.proof(self._kind.dialer, *parts)):
            raise ConfigError("it has another secret")
        return hello.name, encode(self._secret.proof(self._kind.listener, *parts))


class DialerGreeting:
    """The side of one greeting that dialed."""

    def __init__(self, secret: Secret, name: str, kind: Kind) -> None:
        self._secret = secret
        self._name = name
        self._kind = kind
        self._nonce = secrets.token_bytes(NONCE_NBYTES)
        self._challenge: bytes | None = None

    def take(self, raw: bytes) -> bytes | None:
        """The answer to a challenge; None: it was a right welcome. Raises CodecError, ConfigError."""
        if self._challenge is None:
            challenge = _decode_challenge(raw)
            _check(challenge.version, challenge.nonce)
            self._challenge = challenge.nonce
            proof = self._proof(self._kind.dialer, self._challenge)
            return encode(Hello(VERSION, self._name, self._nonce, proof))
        proof = self._proof(self._kind.listener, self._challenge)
        if not hmac.compare_digest(_decode_welcome(raw), proof):
            raise ConfigError("it has another secret")
        return None

    def _proof(self, role: str, challenge: bytes) -> bytes:
        return self._secret.proof(role, self._name, challenge, self._nonce)


def _check(version: int, nonce: bytes) -> None:
    if version != VERSION:
        raise ConfigError(f"it speaks version {version} of the protocol, not {VERSION}")
    if len(nonce) != NONCE_NBYTES:
        raise ConfigError(f"a nonce of {len(nonce)} bytes, not {NONCE_NBYTES}")
