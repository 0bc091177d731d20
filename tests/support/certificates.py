"""Certificates that sign themselves, for servers that speak TLS."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.support.servers import PostgresServer


def make_certificate(directory: Path, address: str) -> Path:
    """Write `server.crt` and `server.key` for an address; return the path of the certificate."""
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    subject = ("-subj", "/CN=tests", "-addext", f"subjectAltName=IP:{address}", "-days", "2")
    files = ("-keyout", directory / "server.key", "-out", directory / "server.crt")
    subprocess.run(["openssl", "req", "-x509", *curve, *subject, *files], check=True, capture_output=True)
    (directory / "server.key").chmod(0o600)
    return directory / "server.crt"


def use_tls(server: PostgresServer) -> None:
    """Have a server that is not running yet speak TLS, with a certificate for its address."""
    certificate = make_certificate(server.data, server.listen)
    if server.account:
        for path in (certificate, certificate.with_suffix(".key")):
            os.chown(path, server.account.uid, server.account.gid)
    server.configure(ssl=True)
