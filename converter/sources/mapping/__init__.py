"""Which tensor of a model each leaf of a checkpoint fills, and how it is turned: rules that are given, or proposed.

Frameworks call weights differently and lay them out differently: Flax has a Dense kernel as [in, out] and a Conv's as
[height, width, in, out], torch as [out, in] and [out, in, height, width].
"""
