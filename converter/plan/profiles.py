"""The profiles that ONNX Runtime runs, each a value: where its graph starts, how it is placed, what it runs on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import onnx_ir as ir

from converter.cpukernel.work import Work
from converter.graph.cuda_support import KernelTable
from converter.passes import Prepared
from converter.plan.decisions import Decision
from converter.plan.overrides import Overrides
from converter.plan.placement import place_cpu, place_cpu_bf16, place_cuda

Place = Callable[[ir.Model, frozenset[str], KernelTable, Overrides, Work], Mapping[str, Decision]]


@dataclass(frozen=True, slots=True)
class Profile:
    """One way to run a model.

    ``base`` picks the prepared graph it starts from, ``place`` decides for each of that graph's nodes. ``device`` is
    what it is for; where there is none, an emulation on the CPU stands in. ``rounds``: nodes that it computes in bf16
    round what they read and give; otherwise weights alone are rounded, but for what products read in one that
    ``rounds_products``. ``uses_kernel``: its products are done by bf16kit's CPU kernel, which wants their weights in
    panels. ``searched``: what is over budget in it is searched for, and mended.
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
            base=lambda prepared: prepared.folded,
            place=lambda model, narrow, _kernels, _overrides, work: place_cpu(model, narrow, work),
            device="cpu",
            rounds=False,
            uses_kernel=True,
        ),
        Profile(
            name="cpu-bf16",
            precision="bf16",
            base=lambda prepared: prepared.folded,
            place=lambda model, narrow, _kernels, overrides, work: place_cpu_bf16(model, narrow, overrides, work),
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
            place=lambda model, narrow, kernels, overrides, _work: place_cuda(model, narrow, kernels, overrides),
            device="cuda:0",
            rounds=True,
            uses_kernel=False,
        ),
    )
}
