"""How operands are stored, and how they are multiplied: the values that ops take.

In come arrays and weights. Out go operands with one protocol: plain, `Quantized`, `Sharded` or
`Chunked`. `recipes/` has the formats in 8 bits, `scaled/` their arrays and matmuls.
"""

from collective_matmul.operands import recipes  # noqa: F401 - Registers the formats.
