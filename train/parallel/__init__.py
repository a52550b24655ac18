"""The model, its parameters and batches on a mesh of devices.

A `Config` and the sizes of a mesh enter. Meshes, the sharding of every array, and the functions
with which a step gathers weights, computes the loss and sums gradients leave.
"""
