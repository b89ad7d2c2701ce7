"""The profiles that ONNX Runtime runs: each one's base graph, placement rules and device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import onnx_ir as ir

from converter.fuse.functions import Fusion
from converter.graph.cuda_kernels import KernelTable
from converter.plan.decisions import Decision, Overrides
from converter.plan.placement import place_cpu, place_cpu_bf16, place_cuda
from converter.rewrite import Prepared

Place = Callable[[ir.Model, frozenset[str], KernelTable, Overrides, Sequence[Fusion]], Mapping[str, Decision]]


@dataclass(frozen=True, slots=True)
class Profile:
    """One way to run a model.

    ``graph`` names the prepared graph that the profile starts from, and ``place`` decides for each node of it.
    ``device`` is the device it is for; if there is none, it is emulated on the CPU. With ``rounds``, nodes computed in
    bf16 round their inputs and outputs; otherwise only weights are rounded. With ``rounds_products``, products also
    round their other inputs. With ``uses_kernel``, bf16kit's CPU kernel computes the products and needs their weights
    in panels. With ``searched``, islands are searched for if the profile is over budget.
    """

    name: str
    precision: str
    graph: Literal["base", "cuda"]
    place: Place
    device: str
    rounds: bool = False
    uses_kernel: bool = False
    rounds_products: bool = False
    searched: bool = True

    def base(self, prepared: Prepared) -> ir.Model:
        """Return the prepared graph that the profile starts from."""
        return prepared.base if self.graph == "base" else prepared.cuda


_CPU = Profile("cpu", "bf16-weights", "base", place_cpu, "cpu", uses_kernel=True)
_CPU_BF16 = Profile(
    "cpu-bf16", "bf16", "base", place_cpu_bf16, "cpu", uses_kernel=True, rounds_products=True, searched=False
)
_CUDA = Profile("cuda", "bf16", "cuda", place_cuda, "cuda:0", rounds=True)

PROFILES: Mapping[str, Profile] = {profile.name: profile for profile in (_CPU, _CPU_BF16, _CUDA)}
