"""Converts a directory of checkpoints, one after the other, each in a process of its own.

``worklist.collect`` lists the checkpoints, ``item.convert`` converts one, and ``run.run`` converts all and prints a
summary. Conversions run on this machine (``executor``) or on the nodes of a Ray cluster (``onray``).
"""
