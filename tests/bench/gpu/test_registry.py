"""The table of CUDA's kernels is made from the lists of the releases, without losing anything."""

from __future__ import annotations

import json
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

from bench.gpu.registry.__main__ import RELEASES, TARGET, kernel_table_json
from bench.gpu.registry.placed import parse_placement, summary_line
from bench.gpu.registry.rows import BF16, merged, narrow, table

OPEN = 2**31 - 1
T = ["tensor(bfloat16)"]


def combinations(kernels: Any) -> set[Any]:
    """Return every combination of types that one of the kernels takes."""
    return {
        frozenset(zip(kernel, types, strict=True))
        for kernel in kernels
        for types in product(*map(sorted, kernel.values()))
    }


def test_merging_keeps_every_combination_and_adds_none() -> None:
    kernels = [{"T1": frozenset({one}), "T2": frozenset({"float", BF16})} for one in ("float", "int64", BF16)] + [
        {"T1": frozenset({"bool"}), "T2": frozenset({"float"})}
    ]
    fewer = merged(kernels)
    assert len(fewer) == 2
    assert combinations(fewer) == combinations(kernels)


def test_only_kernels_that_take_bf16_are_kept_and_an_open_end_is_zero() -> None:
    rows = [
        ("", "MatMul", 13, OPEN, {"T": T}),
        ("", "MatMul", 13, OPEN, {"T": ["tensor(float)"]}),
        ("", "Abs", 6, 12, {"T": ["tensor(double)"]}),
        ("", "Identity", 14, 15, {"V": ["tensor(bfloat16)", "seq(tensor(bfloat16))"]}),
    ]
    assert set(narrow(rows)) == {("", "MatMul", 13, 0), ("", "Identity", 14, 15)}
    assert narrow(rows)["", "Identity", 14, 15] == [{"V": frozenset({BF16, "seq(tensor(bfloat16))"})}]


def test_a_kernel_that_was_removed_and_added_again_has_both_ranges() -> None:
    here, nothing = [("", "Sin", 22, OPEN, {"T": T})], list[Any]()
    made = table({"1.1": nothing, "1.2": here, "1.10": here, "1.11": nothing, "1.12": here})
    assert made["kernels"][""]["Sin"] == [[22, 0, {"T": 0}, "1.2", "1.10"], [22, 0, {"T": 0}, "1.12", ""]]
    assert made["sets"] == [["bfloat16"]]


def test_the_written_file_has_the_table_and_its_releases() -> None:
    of = {"1.9": [("", "Sin", 22, OPEN, {"T": T})], "1.10": [("com.microsoft", "Gelu", 1, OPEN, {"T": T})]}
    read = json.loads(kernel_table_json(dict(of)))
    assert read["releases"] == ["1.9", "1.10"]
    assert {key: read[key] for key in ("sets", "kernels")} == table(of)


def test_the_committed_file_has_the_configured_releases() -> None:
    assert tuple(json.loads(TARGET.read_text("utf-8"))["releases"]) == RELEASES


LOG = """\
2026-11-22 22:29:00.31 [V:onnxruntime:, session_state.cc:1578 VerifyEachNodeIsAssignedToAnEp] Node placements
2026-11-22 22:29:00.31 [V:onnxruntime:, session_state.cc:1584 VerifyEachNodeIsAssignedToAnEp]  Node(s) placed on [CPUExecutionProvider]. Number of nodes: 1
2026-11-22 22:29:00.31 [V:onnxruntime:, session_state.cc:1586 VerifyEachNodeIsAssignedToAnEp]   Concat (node_Concat_93)
2026-11-22 22:29:00.31 [V:onnxruntime:, session_state.cc:1584 VerifyEachNodeIsAssignedToAnEp]  Node(s) placed on [CUDAExecutionProvider]. Number of nodes: 3
2026-11-22 22:29:00.31 [V:onnxruntime:, session_state.cc:1586 VerifyEachNodeIsAssignedToAnEp]   Add (node_add_10)
2026-11-22 22:29:00.31 [I:onnxruntime:, fallback_cpu_capability.cc:89 operator()] Candidate for fallback CPU execution: node_Concat_93
2026-11-22 22:29:00.31 [V:onnxruntime:, session_state.cc:1586 VerifyEachNodeIsAssignedToAnEp]   Add (node_add_18)
2026-11-22 22:29:00.31 [V:onnxruntime:, session_state.cc:1586 VerifyEachNodeIsAssignedToAnEp]   MatMul (node_MatMul_1)
"""  # noqa: E501 -- as ONNX Runtime 1.31.1 writes it


def test_the_placement_of_nodes_is_read_from_a_sessions_log() -> None:
    found = parse_placement(LOG)
    assert found == {"CPUExecutionProvider": {"Concat": 1}, "CUDAExecutionProvider": {"Add": 2, "MatMul": 1}}
    assert summary_line("1.31.1", Path("g"), found) == "1.31.1  g: 3 nodes on CUDA, 1 on the CPU (1 Concat)"


def test_if_one_provider_has_all_nodes_no_node_is_named() -> None:
    head = LOG.splitlines()[1].replace("Node(s) placed", "All nodes placed").replace("CPU", "CUDA")
    assert parse_placement(head) == {"CUDAExecutionProvider": Counter({"": 1})}
    assert summary_line("1.31.1", Path("g"), parse_placement(head)) == "1.31.1  g: 1 nodes on CUDA, 0 on the CPU (none)"
