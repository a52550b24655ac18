"""The formats in 8 bits. A recipe is one file and one line here.

The input is an array. The output is that array in the recipe's format, with its scales.
"""

from collective_matmul.operands.format import register_format
from collective_matmul.operands.recipes.blockwise import BLOCKWISE
from collective_matmul.operands.recipes.rowwise import ROWWISE
from collective_matmul.operands.recipes.tensorwise import TENSORWISE

for _recipe in (TENSORWISE, ROWWISE, BLOCKWISE):
    register_format(_recipe)
