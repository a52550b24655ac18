"""`parallelize`: makes linear layers and attention of an existing Flax model collective.

In come an nnx or linen model and a style for each pattern of paths. Out goes the model with layers
of `layers.linear` in place of its own, or a linen module whose dense layers are intercepted.
"""
