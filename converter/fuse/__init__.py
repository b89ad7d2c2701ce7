"""Finds the work of bf16kit's CPU kernel in a graph, replaces it by the kernel's operators, and defines those."""
