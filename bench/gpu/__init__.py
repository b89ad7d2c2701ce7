"""bf16 on an NVIDIA GPU: measured where there is one, and without: which kernels there are, what data sheets allow."""
