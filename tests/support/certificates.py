"""Certificates for tests."""

import subprocess
from pathlib import Path

from mallee.runtime.transport.tls import TlsFiles


def certificate(folder: Path, name: str) -> TlsFiles:
    """A certificate of 127.0.0.1 that signed itself, and its key."""
    cert, key = str(folder / f"{name}.pem"), str(folder / f"{name}.key")
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
            *("-nodes", "-keyout", key, "-out", cert, "-subj", f"/CN={name}", "-days", "2"),
            *("-addext", "subjectAltName=IP:127.0.0.1"),
        ],
        check=True,
        capture_output=True,
    )
    return TlsFiles(cert, key, cert)
