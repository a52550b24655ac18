"""Operands in 8 bits with scales: packed rows that travel, weights, and their matmuls.

Inputs are arrays, which `scaling` rounds. Outputs are operands that `operands.multiply` multiplies.
"""
