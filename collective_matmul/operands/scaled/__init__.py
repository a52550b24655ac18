"""Operands in 8 bits with scales: packed rows that travel, weights, and their matmuls.

In come arrays, which `scaling` rounds. Out go operands that `operands.multiply` multiplies.
"""
