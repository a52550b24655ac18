"""Row-wise: a scale for each row of x and each column of w."""

from collective_matmul.operands.recipes.recipe import Recipe

ROWWISE = Recipe("rowwise")
