"""The commands of ``bf16-convert``, one file per group. A command imports heavy modules only when it runs."""
