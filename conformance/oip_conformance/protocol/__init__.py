"""The messages that the suite sends and reads, generated from ``proto/`` (``make proto``).

Their protobuf package is the suite's own, so that they load beside the stubs of any client in one process.
"""
