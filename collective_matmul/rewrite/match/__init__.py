"""Matches collectives with the matmuls that can hide them.

In goes the dataflow of a jaxpr, with the collectives that `find` describes in it. Out come matches:
of gathers with what they feed (`gathers`), of sums with what they sum (`sums`), of either with a
dot that only `collective_einsum` executes (`einsum_matches`), each with its gathers of weights
(`weight_gathers`); or a reason. `site_selection` accepts those that can be replaced together
(`PlacedMatch`).

Before that, jaxprs are brought into a form that shows more of them: calls are inlined (`inlining`),
collectives moved into checkpoints (`sinking`), and matmuls narrowed to the half precision that they
are cast from or to (`narrowing`). Such jaxprs are trials: what adds no site does not stay.
"""
