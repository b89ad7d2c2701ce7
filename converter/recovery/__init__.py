"""Recovery: a short fine-tuning after which a model's bf16 outputs match those of its original fp32 weights.

``steps`` runs all steps: read → convert unchanged → train → round → convert → compare with the fp32 outputs.
"""
