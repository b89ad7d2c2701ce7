"""A directory of checkpoints, converted one by one, each in a process of its own.

``worklist.collect`` says what there is, ``item.convert`` converts one of it, ``run.run`` all of it with a summary, on
this machine (``executor``) or on those of a Ray cluster (``onray``).
"""
