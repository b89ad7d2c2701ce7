from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from tlsfiles import Authority

from bf16kit.errors import ConfigError
from service.process.certificates import CertificateFiles, Certificates
from service.process.validity import name_of


def signed(directory: Path, subject: str, names: str) -> Certificates:
    """A certificate that signed itself, for ``names`` (of a subjectAltName), or none."""
    Authority(directory)  # skips where there is no openssl
    key, certificate = directory / "own.key", directory / "own.pem"
    extra = ["-addext", f"subjectAltName={names}"] if names else []
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-keyout", str(key), "-out", str(certificate), "-days", "30", "-subj", subject, *extra]
    subprocess.run(command, check=True, capture_output=True)
    return CertificateFiles(certificate, key).current()


@pytest.mark.parametrize(
    ("subject", "names", "name"),
    [
        ("/CN=old", "DNS:models.example,DNS:other.example", "models.example"),
        ("/CN=old", "IP:10.0.0.1", "10.0.0.1"),
        ("/CN=models.example", "", "models.example"),
        ("/CN=old", "DNS:*.models.example", "any.models.example"),
    ],
)
def test_a_name_that_a_client_may_ask_for(tmp_path: Path, subject: str, names: str, name: str) -> None:
    assert name_of(signed(tmp_path, subject, names)) == name


def test_a_certificate_for_nobody_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="names no host"):
        name_of(signed(tmp_path, "/O=nobody", ""))
