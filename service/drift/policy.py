"""``serving.yaml``'s section on live drift: how much of it is measured."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, field_validator

PROCESS, OFF = "process", "off"
LONGEST_HOST = 253  # characters, as in DNS
_REMOTE = re.compile(r"(grpcs?)://(\[[^\]]*\]|[^/:]*):(\d{1,5})/([!-.0-~]{1,256})(?:/([1-9]\d{0,17}))?", re.ASCII)
_LABEL = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"  # hostnames have no "_", but containers' names do
_NAME = re.compile(rf"{_LABEL}(?:\.{_LABEL})*\.?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Remote:
    """A model of another V2 server. ``version`` is empty for the one that the server prefers.

    ``tls``: it is asked over TLS, and its certificate is checked.
    """

    target: str  # host:port
    model: str
    version: str
    tls: bool = False

    @classmethod
    def parse(cls, text: str) -> Remote | None:
        """Return None if ``text`` is not such an address."""
        found = _REMOTE.fullmatch(text)
        if found is None:
            return None
        scheme, host, port, model, version = found.groups(default="")
        if not 0 < int(port) < 65_536 or not is_host(host):
            return None
        return cls(f"{host}:{port}", model, version, scheme == "grpcs")

    def __str__(self) -> str:
        scheme = "grpcs" if self.tls else "grpc"
        return f"{scheme}://{self.target}/{self.model}" + (f"/{self.version}" if self.version else "")


def is_host(text: str) -> bool:
    """Whether ``text`` is a hostname, an IPv4 address, or an IPv6 address in brackets, which may have a zone."""
    if text.startswith("["):
        address, _, zone = text[1:-1].partition("%")
        try:
            ipaddress.IPv6Address(address)
        except ValueError:
            return False
        return "%" not in text or re.fullmatch(r"[A-Za-z0-9_.-]{1,15}", zone, re.ASCII) is not None
    return len(text) <= LONGEST_HOST and _NAME.fullmatch(text) is not None


class ShadowPolicy(BaseModel):
    """The policy that selects the live requests to run again on the fp32 reference.

    ``rate`` of the requests, but at least ``min_per_second`` while so many come, and at most ``max_per_second``, which
    wins over the floor. So a quiet model is measured whole, and a busy one costs little. ``rate`` 0 turns the shadow
    off; the reference is then never loaded.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    rate: float = Field(default=0.01, ge=0, le=1)
    min_per_second: float = Field(default=0.5, ge=0)  # 0: no floor
    max_per_second: float = Field(default=1.0, gt=0)
    max_rows: PositiveInt = 8  # per request; further rows of a larger request are not measured
    max_bytes: PositiveInt = 64 << 20  # inputs and outputs of the waiting samples
    # What computes the fp32 outputs: a process of this server, a model of another server, or nothing.
    reference: str = PROCESS
    reference_memory_bytes: PositiveInt | None = None  # for this model in that process; None: from the model's size

    @field_validator("reference", mode="before")
    @classmethod
    def _off_in_yaml(cls, value: Any) -> Any:
        return OFF if value is False else value

    @field_validator("reference")
    @classmethod
    def _valid_reference(cls, value: str) -> str:
        if value not in (PROCESS, OFF) and Remote.parse(value) is None:
            bad_host = (found := _REMOTE.fullmatch(value)) is not None and not is_host(found[2])
            raise ValueError(
                f"give {PROCESS}, {OFF} or grpc://HOST:PORT/MODEL[/VERSION], over TLS grpcs://HOST:PORT/MODEL[/VERSION]"
                + (
                    f"; HOST is a name of at most {LONGEST_HOST} letters, digits, '-', '_' and '.', an IPv4 address, or"
                    " an IPv6 address in brackets"
                    if bad_host
                    else ""
                )
            )
        return value

    @property
    def on(self) -> bool:
        """Whether anything is measured."""
        return self.rate > 0 and self.reference != OFF

    @property
    def remote(self) -> Remote | None:
        return Remote.parse(self.reference)
