"""Finds the smallest set of fp32 islands with which a profile is within its budget.

``switches`` builds one graph in which an input turns each rounding to bf16 on or off, so that one session can try any
plan. ``trials`` runs it. ``ranking`` measures where the error comes from. ``choice`` finds a set that suffices and
removes what is not needed. ``costs`` measures what an island withholds from bf16. ``search`` combines them.
"""
