"""Proposed maps: shapes decide if they differ, names otherwise, and a guess is marked as a guess."""

from __future__ import annotations

import jaxlikes
import numpy as np
import pytest
import yaml
from architectures import Mlp, Tied
from numpy.typing import NDArray
from torch import nn

from converter.read.mapping import rules
from converter.read.mapping.proposal import Proposal, propose
from converter.read.mapping.slots import of_module
from converter.read.mapping.words import numbers_of, similarity, words_of

Leaves = dict[str, NDArray[np.float32]]


def _leaf(*shape: int) -> NDArray[np.float32]:
    return np.zeros(shape, np.float32)


def _dense(name: str, inside: int, outside: int) -> Leaves:
    return {f"params.{name}.kernel": _leaf(inside, outside), f"params.{name}.bias": _leaf(outside)}


def _to(found: Proposal) -> dict[str, str | None]:
    return {entry.leaf: entry.to for entry in found.entries}


def _steps(found: Proposal, leaf: str) -> list[str]:
    return next([str(turn) for turn in entry.steps] for entry in found.entries if entry.leaf == leaf)


def test_shapes_decide_if_they_differ_whatever_the_names() -> None:
    found = propose(_dense("down", 16, 64) | _dense("up", 64, 10), of_module(Mlp()))
    assert _to(found)["params.down.kernel"] == "up.weight"
    assert _to(found)["params.up.bias"] == "down.bias"
    assert _steps(found, "params.down.kernel") == ["{transpose: [1, 0]}"]
    assert found.certain


def test_names_decide_between_layers_of_one_shape() -> None:
    found = propose(_dense("down", 16, 16) | _dense("up", 16, 16), of_module(Mlp(16, 16, 16)))
    assert _to(found)["params.down.kernel"] == "down.weight"
    assert _to(found)["params.up.kernel"] == "up.weight"
    assert found.certain


def test_a_square_kernel_is_transposed_and_a_table_is_not() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(16, 16), "dense": nn.Linear(16, 16, bias=False)})
    leaves = {"params.Embed_0.embedding": _leaf(16, 16), "params.Dense_0.kernel": _leaf(16, 16)}
    found = propose(leaves, of_module(model))
    assert _steps(found, "params.Dense_0.kernel") == ["{transpose: [1, 0]}"]
    assert _steps(found, "params.Embed_0.embedding") == []
    assert _to(found) == {"params.Embed_0.embedding": "embed.weight", "params.Dense_0.kernel": "dense.weight"}


def test_series_are_paired_in_the_order_of_their_numbers() -> None:
    """They are compared as numbers, not as text: 10 comes after 2. torch also counts the layers in between."""
    count = 12
    model = nn.Sequential(*(layer for _ in range(count) for layer in (nn.Linear(8, 8), nn.ReLU())))
    leaves = {k: v for index in range(count) for k, v in _dense(f"Dense_{index}", 8, 8).items()}
    found = propose(dict(sorted(leaves.items())), of_module(model))
    assert _to(found)["params.Dense_2.kernel"] == "4.weight"
    assert _to(found)["params.Dense_10.bias"] == "20.bias"
    assert found.certain


def test_a_guess_is_marked_as_ambiguous_and_not_certain() -> None:
    found = propose(_dense("Dense_0", 16, 16) | _dense("Dense_1", 16, 16), of_module(Mlp(16, 16, 16)))
    assert found.complete
    assert not found.certain
    assert set(found.ambiguous) == set(_to(found))
    assert "ambiguous, because shapes are equal and names do not decide: params.Dense_0.kernel" in found.text()


def test_names_that_are_equally_similar_to_several_do_not_decide() -> None:
    layers = nn.ModuleDict({f"block_{name}": nn.Linear(8, 8) for name in ("gamma", "delta")})
    found = propose(_dense("block_alpha", 8, 8) | _dense("block_beta", 8, 8), of_module(layers))
    assert len(found.ambiguous) == 4


def test_scale_bias_mean_and_var_of_one_shape_are_matched_by_their_role() -> None:
    leaves = {f"params.norm.{name}": _leaf(64) for name in ("bias", "scale")}
    leaves |= {f"batch_stats.norm.{name}": _leaf(64) for name in ("var", "mean")}
    leaves |= _dense("up", 16, 64) | _dense("down", 64, 10)
    found = propose(leaves, of_module(jaxlikes.Mlp()))
    assert _to(found)["batch_stats.norm.var"] == "bn.running_var"
    assert _to(found)["params.norm.scale"] == "bn.weight"
    assert found.keep == ("bn.num_batches_tracked",)
    assert found.certain


def test_heads_on_separate_axes_are_joined() -> None:
    leaves: Leaves = {
        "params.embed.embedding": _leaf(32, 16),
        "params.n1.scale": _leaf(16),
        "params.n1.bias": _leaf(16),
    }
    leaves |= {"params.n2.scale": _leaf(16), "params.n2.bias": _leaf(16)}
    for name in ("query", "key", "value"):
        leaves |= {f"params.attention.{name}.kernel": _leaf(16, 4, 4), f"params.attention.{name}.bias": _leaf(4, 4)}
    leaves |= {"params.attention.out.kernel": _leaf(4, 4, 16), "params.attention.out.bias": _leaf(16)}
    leaves |= _dense("up", 16, 64) | _dense("down", 64, 16)
    found = propose(leaves, of_module(jaxlikes.Block()))
    assert _to(found)["params.attention.key.kernel"] == "attn.k_proj.weight"
    assert _steps(found, "params.attention.out.kernel") == ["{reshape: [16, 16]}", "{transpose: [1, 0]}"]
    assert _steps(found, "params.attention.key.bias") == ["{reshape: [16]}"]
    assert found.complete


def test_leaves_that_are_not_weights_of_the_model_are_dropped() -> None:
    leaves = _dense("up", 16, 64) | _dense("down", 64, 10) | {"step": np.array(3), "ema.up.kernel": _leaf(16, 64)}
    found = propose(leaves, of_module(Mlp()))
    assert _to(found)["step"] is None
    assert _to(found)["ema.up.kernel"] is None
    assert found.certain


def test_tied_weights_are_filled_once() -> None:
    leaves = {"params.table.embedding": _leaf(64, 16)} | _dense("inner", 16, 16)
    found = propose(leaves, of_module(Tied()))
    assert found.certain
    assert _to(found)["params.table.embedding"] == "table.weight"


def test_leaves_without_a_tensor_and_tensors_without_a_leaf_are_named() -> None:
    found = propose(_dense("up", 16, 64) | {"params.odd": _leaf(7)}, of_module(Mlp()))
    assert not found.complete
    assert "no tensor of the model was found for: params.odd" in found.text()
    assert "nothing in the checkpoint was found for the model's: down.weight, down.bias" in found.text()


def test_a_mirrored_kernel_is_never_proposed() -> None:
    model = nn.Sequential(nn.ConvTranspose2d(3, 3, 3, bias=False))
    found = propose({"params.ConvTranspose_0.kernel": _leaf(3, 3, 3, 3)}, of_module(model))
    assert found.unmatched == ("params.ConvTranspose_0.kernel",)


@pytest.mark.parametrize("odd", ["a\nrules: []", "a: b", "# c"])
def test_no_name_can_end_a_comment_of_the_file(odd: str) -> None:
    found = propose({f"params.{odd}": _leaf(7), f"params.{odd}2": _leaf(64, 10)}, of_module(Mlp()))
    assert yaml.safe_load(found.text()) is not None
    assert next(line for line in found.text().splitlines() if not line.startswith("#")) == "rules:"
    assert found.text().count("\nrules:") == 1


def test_the_printed_map_equals_the_map_that_is_used() -> None:
    leaves = _dense("up", 16, 64) | _dense("down", 64, 10) | {"step": np.array(3)}
    slots = of_module(Mlp())
    found = propose(leaves, slots)
    given = yaml.safe_load(found.text())
    assert [rule["match"] for rule in given["rules"]] == [rule.match.pattern for rule in found.rules().rules]
    assert set(rules.apply(found.rules(), leaves, slots).tensors) == set(slots.by_name)


def test_words_of_different_frameworks_are_unified() -> None:
    assert words_of("encoder.layers.3.self_attn.q_proj") == ("encoder", "layer", "self", "attention", "query", "dense")
    assert words_of("LayerNorm_0") == ("layer", "norm")
    assert numbers_of("layers_10.conv2d") == (10, 2)
    assert similarity(words_of("attention.query"), words_of("attn.q_proj")) == 0.8
    assert similarity(("a",), ("b",)) == 0
