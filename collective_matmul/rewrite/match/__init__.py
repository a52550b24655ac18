"""Matches collectives with the matmuls that can hide them.

In goes the dataflow of a jaxpr, with the collectives that `find` describes in it. Out come matches:
of gathers with what they feed (`gathers`), of sums with what they sum (`sums`), of either with a
dot that only `collective_einsum` executes (`einsum_matches`), each with its gathers of weights
(`weight_gathers`); or a reason. `site_order` accepts those that can be replaced together
(`PlacedMatch`).

Before that, `normal_form` inlines calls, moves collectives into checkpoints, and folds casts into
the half-precision matmuls that they are beside. Such jaxprs are trials: what adds no site does not
stay. Transposes, reshapes and scalings become part of a match: what happens on a shard (`ShardOp`),
and an exact factor.
"""
