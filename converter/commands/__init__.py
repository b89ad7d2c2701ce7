"""The commands of ``bf16-convert``, one file for each group. Everything heavy is imported by the command that runs."""
