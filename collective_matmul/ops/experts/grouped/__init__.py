"""Grouped matmuls: groups of rows, each multiplied by a matrix of its own."""
