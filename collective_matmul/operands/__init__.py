"""How operands are stored, and how they are multiplied: the values that ops take.

Inputs are arrays and weights. Outputs are operands with one protocol: plain, `Quantized`, `Sharded`
or `Chunked`; and their products, by `multiply`.

- format: how operands of an op are stored. recipes/: the formats in 8 bits. scaled/: their arrays.
- quantized, sharded, chunked, grouped, beside: one storage each. weight_blocks: products of shards.
"""

from collective_matmul.operands import recipes  # noqa: F401 - Registers the formats.
