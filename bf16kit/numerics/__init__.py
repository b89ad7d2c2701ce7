"""bf16 and fp32 as numbers: rounding, the residual that undoes it, and the kernel's layout of weights."""
