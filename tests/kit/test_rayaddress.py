"""Knocking at the address of a Ray cluster."""

from __future__ import annotations

import socket

import pytest

from bf16kit.rayaddress import knock


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_where_somebody_listens(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host.strip("[]"), 0), family=family)
    except OSError:
        pytest.skip(f"this machine has no {host}")
    with listening:
        knock(f"{host}:{listening.getsockname()[1]}")


def test_where_nobody_does() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    with pytest.raises(OSError, match="refused"):
        knock(f"127.0.0.1:{port}")


def test_a_port_that_cannot_be_is_an_error_like_any_other() -> None:
    with pytest.raises(OSError, match="port 99999 is over 65535"):
        knock("127.0.0.1:99999")


@pytest.mark.parametrize("address", ["", "auto", "local", "ray://127.0.0.1:1", "127.0.0.1", "host:port", ":1"])
def test_what_is_no_host_and_port_is_left_to_ray(address: str) -> None:
    knock(address)
