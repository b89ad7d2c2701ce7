"""Recovery: a short fine-tuning after which a model's bf16 outputs match those of its original fp32 weights."""
