from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from tlsfiles import Authority

from bf16kit.messages.errors import ConfigError
from service.config.certificates import CertificateFiles, Certificates


def signed(directory: Path, subject: str, names: str) -> Certificates:
    """Return a self-signed certificate for ``names`` (a subjectAltName), or without any."""
    Authority(directory)  # skips the test if openssl is missing
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
def test_the_name_is_one_that_a_client_may_use(tmp_path: Path, subject: str, names: str, name: str) -> None:
    assert signed(tmp_path, subject, names).name() == name


def test_a_certificate_without_a_host_name_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="names no host"):
        signed(tmp_path, "/O=nobody", "").name()
