"""A mixture of experts as matrix products that can be exported: each expert computes every token.

transformers' own functions loop over the experts that were chosen, which no graph can follow, or copy an expert's
matrices for each token, which takes gigabytes. Here the router's shares, zero for experts that were not chosen, do the
choosing. This costs experts / chosen experts times the arithmetic, and reads every matrix once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

NAME = "bf16kit"


def register() -> str:
    """Make the function known to transformers; return the name of its ``experts_implementation``."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(NAME, _experts)
    return NAME


def _experts(experts: Any, hidden: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """Return [tokens, width] of ``hidden`` [tokens, width]; ``chosen`` and ``shares`` are [tokens, chosen experts].

    Only an export or a trace gets the products. Otherwise the class's own loop runs, so that the source's answers, with
    which the export is compared, are those of transformers.
    """
    import torch

    if not (torch.compiler.is_exporting() or torch._C._is_tracing()):
        own: torch.Tensor = type(experts).forward.__wrapped__(experts, hidden, chosen, shares)
        return own
    is_chosen = chosen.unsqueeze(-1) == torch.arange(experts.num_experts)
    share = (is_chosen * shares.unsqueeze(-1)).sum(dim=1)  # [tokens, experts]
    value = _linear(experts, hidden.unsqueeze(0), "gate_up_proj" if experts.has_gate else "up_proj")
    value = experts._apply_gate(value) if experts.has_gate else experts.act_fn(value)
    value = _linear(experts, value, "down_proj")  # [experts, tokens, width]
    if getattr(experts, "has_post_expert_norm", False):
        value = experts.post_expert_norm(value)
    return (value * share.T.unsqueeze(-1)).sum(dim=0).to(hidden.dtype)


def _linear(experts: Any, value: torch.Tensor, name: str) -> torch.Tensor:
    """Return ``value`` [experts or 1, tokens, in] times each expert's matrix, plus its bias: [experts, tokens, out]."""
    matrix = getattr(experts, name)
    product: torch.Tensor = value @ (matrix if experts.is_transposed else matrix.mT)
    return product + getattr(experts, f"{name}_bias").unsqueeze(1) if experts.has_bias else product
