import ssl
import subprocess
from pathlib import Path

import pytest
from tlsfiles import Authority, Pair
from waiting import until

from bf16kit.messages.errors import ConfigError
from bf16kit.service.config import reloadedfiles
from bf16kit.service.config.certificates import CertificateFiles, Certificates


def test_the_certificates_are_available_as_pem_and_as_a_context(authority: Authority, pair: Pair) -> None:
    held = CertificateFiles(pair.certificate, pair.key, authority.certificate).current()
    assert held.certificate == pair.certificate.read_bytes()
    assert held.key == pair.key.read_bytes()
    assert held.client_ca == authority.certificate.read_bytes()
    assert held.context.minimum_version is ssl.TLSVersion.TLSv1_2
    assert held.context.verify_mode is ssl.CERT_OPTIONAL
    assert "PRIVATE KEY" not in repr(held)


def test_files_that_are_not_pem_or_missing_or_do_not_match_are_rejected(
    authority: Authority, pair: Pair, tmp_path: Path
) -> None:
    (tmp_path / "text").write_text("secret text")
    locked = tmp_path / "locked.key"  # no password is asked for
    command = ["openssl", "ec", "-in", str(pair.key), "-aes128", "-passout", "pass:secret", "-out", str(locked)]
    subprocess.run(command, check=True, capture_output=True)
    mismatch = r"tls_certificate .* and tls_key .* cannot be used: key values mismatch"
    for certificate, key, ca, message in (
        (tmp_path / "text", pair.key, None, "tls_certificate .* cannot be used"),
        (pair.certificate, tmp_path / "text", None, "tls_key .* cannot be used"),
        (pair.certificate, pair.key, tmp_path / "text", "tls_client_ca .* cannot be used"),
        (tmp_path / "gone", pair.key, None, "tls_certificate .*gone: cannot be read: No such file"),
        (pair.certificate, authority.sign("other").key, None, mismatch),
        (pair.certificate, locked, None, "unencrypted"),
    ):
        with pytest.raises(ConfigError, match=message) as refused:
            CertificateFiles(certificate, key, ca)
        assert "secret text" not in str(refused.value)


def test_a_new_matching_pair_is_used_and_a_mismatched_one_is_not(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(reloadedfiles, "CHECK_SECONDS", 0.01)
    first, second = authority.sign("first"), authority.sign("second")
    certificate, key = tmp_path / "tls.crt", tmp_path / "tls.key"
    certificate.write_bytes(first.certificate.read_bytes())
    key.write_bytes(first.key.read_bytes())
    held = CertificateFiles(certificate, key)
    before = held.current()
    assert held.current() is before
    certificate.write_bytes(second.certificate.read_bytes())  # half of a rotation: the key is still the old one
    until(lambda: "the old ones stay in force: tls_certificate" in caplog.text)
    assert held.current() is before
    key.write_bytes(second.key.read_bytes())
    until(lambda: held.current().certificate == second.certificate.read_bytes())


# --- as a client sees it ----------------------------------------------------------------------------------------------


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
        ("/O=nobody", "", None),
        ("/CN=old", "DNS:models.example,DNS:other.example", "models.example"),
        ("/CN=old", "IP:10.0.0.1", "10.0.0.1"),
        ("/CN=models.example", "", "models.example"),
        ("/CN=old", "DNS:*.models.example", "any.models.example"),
    ],
)
def test_the_name_is_one_that_a_client_may_use(tmp_path: Path, subject: str, names: str, name: str | None) -> None:
    certificate = signed(tmp_path, subject, names)
    if name is None:
        with pytest.raises(ConfigError, match="names no host"):
            certificate.name()
    else:
        assert certificate.name() == name
