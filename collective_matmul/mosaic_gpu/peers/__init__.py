"""Memory of peer GPUs: how the host shares it, and how kernels store, signal and wait in it.

In come the devices of a program. Kernels get the addresses of their peers' arrays, and a report if
a peer does not come.
"""
