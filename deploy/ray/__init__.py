"""bf16-serve's servicer and runtime behind Ray Serve: replicas on many machines, one gRPC address. See docs/scaling.md.

``ingress`` runs in Ray's gRPC proxies, ``replica`` where a model runs, ``front`` where requests go that are for no
single model, or for one that is not there; ``cluster`` says to Ray what is to run, ``__main__`` is the command line.
"""
