"""TLS certificates for tests, made with openssl: an authority, and the certificates that it signs."""

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class Pair:
    """A certificate and its key, PEM."""

    certificate: Path
    key: Path


class Authority:
    """A CA in ``directory``. Skips the test if openssl is not installed."""

    def __init__(self, directory: Path, name: str = "ca") -> None:
        if shutil.which("openssl") is None:
            pytest.skip("openssl is not installed")
        self._directory = directory
        self.pair = Pair(directory / f"{name}.pem", directory / f"{name}.key")
        _openssl(
            *_request(self.pair.key, name), "-x509", "-days", "30", "-out", str(self.pair.certificate),
            "-addext", "basicConstraints=critical,CA:TRUE", "-addext", "keyUsage=critical,keyCertSign",
        )  # fmt: skip

    @property
    def certificate(self) -> Path:
        return self.pair.certificate

    def sign(self, name: str, *, days: int = 30, names: str = "DNS:localhost,IP:127.0.0.1") -> Pair:
        """Return a pair for ``names``, by default ``localhost`` and 127.0.0.1; it also works for a client."""
        pair = Pair(self._directory / f"{name}.pem", self._directory / f"{name}.key")
        request_file, extensions = self._directory / f"{name}.csr", self._directory / f"{name}.ext"
        extensions.write_text(f"subjectAltName={names}\n")
        _openssl(*_request(pair.key, name), "-out", str(request_file))
        _openssl(
            "x509", "-req", "-in", str(request_file), "-CA", str(self.pair.certificate), "-CAkey", str(self.pair.key),
            "-CAcreateserial", "-days", str(days), "-extfile", str(extensions), "-out", str(pair.certificate),
        )  # fmt: skip
        return pair


def _request(key: Path, name: str) -> list[str]:
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
    return ["req", *curve, "-nodes", "-keyout", str(key), "-subj", f"/CN={name}"]


def _openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)
