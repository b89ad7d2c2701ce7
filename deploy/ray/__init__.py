"""bf16-serve's models behind Ray Serve: replicas on many machines, one gRPC address. See docs/scaling.md.

Ray's gRPC proxies accept the RPCs of ``rpcs`` for the ``front``. It answers what concerns no single model, and passes
the rest to a model's ``replica``. ``cluster`` deploys both; ``__main__`` is the command line.
"""
