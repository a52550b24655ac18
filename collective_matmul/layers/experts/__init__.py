"""Routers and experts as Flax nnx modules, and the statistics and losses of routers.

Inputs are tokens, local or global. Outputs are the results of each token's experts, weighted and
summed by `expert_mlp`, and a router's statistics.
"""
