"""Finding the smallest set of fp32 islands with which a profile keeps to its budget.

``switches`` makes one graph in which every rounding to bf16 can be turned on or off by an input, so that one session
tries any plan. ``trials`` runs it, ``ranking`` says where the error comes from, ``choice`` finds a set that suffices
and takes out of it what is not needed, ``costs`` counts what an island keeps from bf16, ``search`` puts them together.
"""
