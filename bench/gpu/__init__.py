"""bf16 on an NVIDIA GPU, where there is one."""
