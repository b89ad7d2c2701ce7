"""A conformance suite for the Open Inference Protocol v2 over gRPC as Triton speaks it: ``python -m conformance``.

It is a client and nothing else: it imports nothing of this repository, and can be pointed at any server.
"""
