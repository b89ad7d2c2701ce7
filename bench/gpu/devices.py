"""What three GPUs can do at most, from NVIDIA's data sheets: nothing here was measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Device:
    """Peak rates of dense products in FLOP/s by precision (``bf16``, ``tf32``, ``fp32``), and of memory in bytes/s.

    Data sheets give tensor cores' rates for matrices of which half is zero: these are half of those.
    """

    name: str
    flops: Mapping[str, float]
    bandwidth: float
    source: str


DEVICES: Mapping[str, Device] = {
    device.name: device
    for device in (
        Device(
            "H200",
            {"bf16": 1979e12 / 2, "tf32": 989e12 / 2, "fp32": 67e12},
            4.8e12,
            "NVIDIA H200, SXM: https://www.nvidia.com/en-us/data-center/h200/",
        ),
        Device(
            "A100",
            {"bf16": 624e12 / 2, "tf32": 312e12 / 2, "fp32": 19.5e12},
            2.039e12,
            "NVIDIA A100, 80 GB, SXM: https://www.nvidia.com/en-us/data-center/a100/",
        ),
        Device(
            "L4",
            {"bf16": 242e12 / 2, "tf32": 120e12 / 2, "fp32": 30.3e12},
            300e9,
            "NVIDIA L4: https://www.nvidia.com/en-us/data-center/l4/",
        ),
    )
}
