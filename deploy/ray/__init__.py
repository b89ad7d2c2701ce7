"""bf16-serve's servicer and runtime behind Ray Serve: replicas on many machines, one gRPC address. See docs/scaling.md.

``ingress`` runs in Ray's gRPC proxies, ``replica`` where a model runs. ``front`` gets requests that concern no single
model, or one that does not exist. ``cluster`` deploys the applications on Ray, and ``__main__`` is the command line.
"""
