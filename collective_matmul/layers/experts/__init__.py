"""Routers and experts as Flax nnx modules, and the statistics and losses of routers.

In come tokens, local or global. Out go each token's experts, weighted and summed by `expert_mlp`.
"""
