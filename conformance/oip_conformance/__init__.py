"""A conformance suite for the Open Inference Protocol v2 over gRPC as Triton implements it: ``oip-conformance``.

It is only a client, and can check any server.
"""
