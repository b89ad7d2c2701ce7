"""Certificates for the tests that use TLS."""

import pytest
from tlsfiles import Authority, Pair


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module")
def pair(authority: Authority) -> Pair:
    """Return a certificate and its key for ``localhost`` and 127.0.0.1."""
    return authority.sign("server")
