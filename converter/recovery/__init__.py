"""Recovery: a short fine-tune that makes a model's bf16 answers those that its fp32 weights gave.

``walk`` is the whole of it: read → convert as it is → train → round → convert → compare with what fp32 answered.
"""
