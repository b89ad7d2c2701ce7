"""The messages that the suite sends and reads, generated from ``proto/`` beside this package.

Their protobuf package is the suite's own, so that they load beside the stubs of any client in one process.
"""
