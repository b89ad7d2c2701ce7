"""Maps a checkpoint's leaves to a model's tensors, and reorders their axes, by rules that are given or proposed.

Frameworks name weights and order their axes differently. Flax has a Dense kernel as [in, out] and a Conv kernel as
[height, width, in, out]; torch has [out, in] and [out, in, height, width].
"""
