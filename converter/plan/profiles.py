"""The profiles that ONNX Runtime runs: each one's base graph, placement rules and device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

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

    ``base`` picks the prepared graph that the profile starts from, and ``place`` decides for each node of it.
    ``device`` is the device it is for; if there is none, it is emulated on the CPU. With ``rounds``, nodes computed in
    bf16 round their inputs and outputs; otherwise only weights are rounded. With ``rounds_products``, products also
    round their other inputs. With ``uses_kernel``, bf16kit's CPU kernel computes the products and needs their weights
    in panels. With ``searched``, islands are searched for if the profile is over budget.
    """

    name: str
    precision: str
    base: Callable[[Prepared], ir.Model]
    place: Place
    device: str
    rounds: bool
    uses_kernel: bool
    rounds_products: bool = False
    searched: bool = True


PROFILES: Mapping[str, Profile] = {
    profile.name: profile
    for profile in (
        Profile(
            name="cpu",
            precision="bf16-weights",
            base=lambda prepared: prepared.base,
            place=lambda model, narrow, _kernels, _overrides, fusions: place_cpu(model, narrow, fusions),
            device="cpu",
            rounds=False,
            uses_kernel=True,
        ),
        Profile(
            name="cpu-bf16",
            precision="bf16",
            base=lambda prepared: prepared.base,
            place=lambda model, narrow, _kernels, overrides, fusions: place_cpu_bf16(model, narrow, overrides, fusions),
            device="cpu",
            rounds=False,
            uses_kernel=True,
            rounds_products=True,
            searched=False,
        ),
        Profile(
            name="cuda",
            precision="bf16",
            base=lambda prepared: prepared.cuda,
            place=lambda model, narrow, kernels, overrides, _fusions: place_cuda(model, narrow, kernels, overrides),
            device="cuda:0",
            rounds=True,
            uses_kernel=False,
        ),
    )
}
