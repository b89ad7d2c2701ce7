"""A conformance suite for the Open Inference Protocol v2 over gRPC as Triton implements it: ``python -m conformance``.

It is only a client: it imports nothing of this repository, and can check any server.
"""
