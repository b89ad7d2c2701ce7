"""``check_reachable``: a trial connection to the address of a Ray cluster."""

from __future__ import annotations

import socket

import pytest

from bf16kit.system import is_older
from bf16kit.system.rayaddress import check_reachable


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_an_address_with_a_listener_is_accepted(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host.strip("[]"), 0), family=family)
    except OSError:
        pytest.skip(f"this machine has no {host}")
    with listening:
        check_reachable(f"{host}:{listening.getsockname()[1]}")


def test_an_address_without_a_listener_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    with pytest.raises(OSError, match="refused"):
        check_reachable(f"127.0.0.1:{port}")


def test_an_impossible_port_is_an_os_error_too() -> None:
    with pytest.raises(OSError, match="port 99999 is over 65535"):
        check_reachable("127.0.0.1:99999")


@pytest.mark.parametrize("address", ["", "auto", "local", "ray://127.0.0.1:1", "127.0.0.1", "host:port", ":1"])
def test_an_address_that_is_not_host_and_port_is_left_to_ray(address: str) -> None:
    check_reachable(address)


@pytest.mark.parametrize(
    ("version", "other"), [("1.9", "1.24"), ("1.24", "1.24.1"), ("1.30.9", "1.31.1"), ("1.31.1", "2.0.dev1")]
)
def test_versions_are_compared_as_numbers(version: str, other: str) -> None:
    assert is_older(version, other)
    assert not is_older(other, version)


def test_a_pre_release_counts_as_the_release() -> None:
    assert not is_older("1.40.0.dev20270101", "1.40.0")
    assert not is_older("1.24.0rc1", "1.24.0")
