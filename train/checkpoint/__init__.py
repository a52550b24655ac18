"""Checkpoints, and the weights that a run begins with.

A sharded train state and the position in the data enter files, and leave them onto any mesh.
"""
