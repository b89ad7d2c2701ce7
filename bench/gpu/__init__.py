"""bf16 on an NVIDIA GPU."""
