"""Finds the smallest set of fp32 islands with which a profile is within its budget, and the layer where drift arises.

``switches`` builds one graph in which an input turns each rounding to bf16 on or off, so that one session can try any
plan. ``trials`` runs and judges it. ``candidates`` ranks what may be kept in fp32 by its error and its cost, and finds
a set that suffices with nothing unneeded. ``search`` combines them. ``explanation`` shows each layer, and the remedy.
"""
