"""Program 1, ``bf16-convert``: turns an fp32 checkpoint into a bf16 artifact and proves its accuracy."""
