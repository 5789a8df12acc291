"""TLS between processes of the app: each end shows a certificate of one authority, which is the app's own."""

import ssl
from pathlib import Path
from typing import NamedTuple

from mallee.protocol.errors import ConfigError


class TlsFiles(NamedTuple):
    """PEM files. `ca` signed the certificates of all gateways and workers; one that all share is its own."""

    cert: str
    key: str
    ca: str


def server_tls(files: TlsFiles) -> ssl.SSLContext:
    """For the end that listens. Raises ConfigError."""
    context = _loaded(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), files)
    context.verify_mode = ssl.CERT_REQUIRED
    return context


def client_tls(files: TlsFiles) -> ssl.SSLContext:
    """For the end that dials. Raises ConfigError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    # Workers are told by the authority alone: their hosts are addresses that come and go.
    context.check_hostname = False
    return _loaded(context, files)


def expiry(files: TlsFiles) -> float:
    """The end of the certificate, in seconds since the epoch. Raises ConfigError."""
    from cryptography import x509  # which `router` and `picker` do without

    server_tls(files)  # names what is wrong with the files
    found = x509.load_pem_x509_certificate(Path(files.cert).read_bytes())
    return found.not_valid_after_utc.timestamp()


def _loaded(context: ssl.SSLContext, files: TlsFiles) -> ssl.SSLContext:
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        context.load_cert_chain(files.cert, files.key)
        context.load_verify_locations(files.ca)
    except OSError as error:
        raise ConfigError(f"links.tls_cert, tls_key or tls_ca can't be used: {error}") from error
    return context
