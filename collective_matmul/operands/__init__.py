"""How operands are stored, and how they are multiplied: the values that ops take."""

from collective_matmul.operands import recipes  # noqa: F401 - Registers the formats.
