"""`parallelize`: makes linear layers and attention of an existing Flax model collective.

The input is an nnx or linen model, and a style for each pattern of paths. The output is the nnx
model with layers of `layers.linear` in place of its own, or a wrapper that intercepts the layers of
the linen module. Files with nnx or linen in their name are for one of both; the others are shared.
"""
