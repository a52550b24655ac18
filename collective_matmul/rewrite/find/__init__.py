"""Finds what communicates in a program, and where.

In goes the jaxpr of a program, as JAX traced it. Out come its collectives, each with its kind, mesh
axis and dimension (`Collective`), or a reason why it is left alone (`FoundSite`).

Inside shard_map they are equations of the program. Over Explicit mesh axes, types of arrays show
them (`placements`, `explicit_regions`); those equations are first written as a shard_map
(`manual_regions`), so that both kinds of programs have one description. `divergence` adds which
devices execute a collective. `written_blocks` recognizes those that have an op of their own.
`commuting` says which equations beside a collective may change places with it, `scoped_recipes`
which sites are in 8 bits.
"""
