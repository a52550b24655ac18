"""Operands in 8 bits of the programs that sites are measured in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from collective_matmul.operands.recipes.recipe import Recipe
from collective_matmul.ops.matmul.checks import RecipeName
from collective_matmul.ops.matmul.measured_program import StackOperands
from collective_matmul.ops.matmul.request import Site
from tests.fp8_reference import (
    SHIPPED_RECIPES,
    dequantized,
    quantize_rows,
    quantize_weights,
    weight_gradient,
)
from tests.ops.matmul.test_fp8_programs import E4M3, GRADIENTS, Program, dtype_of
from tests.tuning.test_matmul_measurement import (
    DEVICES,
    assert_close,
    every_site,
    expected,
    random_operands,
    shards,
    stack_of,
)


@every_site
@pytest.mark.parametrize("fp8", SHIPPED_RECIPES)
@pytest.mark.parametrize("implementation", ["xla", "ring"])
def test_a_site_in_8_bits_is_measured_with_quantized_operands(
    name: str, fp8: RecipeName, implementation: str
) -> None:
    stack = stack_of(name, fp8)
    stack.repetitions = 2
    plain = random_operands(stack)
    quantized = jax.jit(stack.prepare)(plain)
    described = stack.operands("xla")
    assert jax.tree.map(kind_of, quantized) == jax.tree.map(kind_of, described)
    results = jax.jit(stack.program(implementation))(quantized)
    for (products, gradients), ws in zip(results, plain.weights, strict=True):
        exact_products, _ = expected(name, *through_8_bits(stack.site, plain, ws))
        assert_close(products, exact_products)
        assert_close(gradients, gradients_in_8_bits(name, stack.site, plain, ws))


def kind_of(array: Any) -> tuple[Any, ...]:
    return array.shape, array.dtype, array.sharding


def joined(parts: Sequence[Any]) -> Any:
    return jax.tree.map(lambda *arrays: jnp.concatenate(arrays), *parts)


def through_8_bits(
    site: Site, operands: StackOperands, ws: Sequence[Any]
) -> tuple[StackOperands, list[np.ndarray]]:
    """Arrays that the quantized xs and weights of each device stand for."""
    recipe, backward = site.format, site.has_weight_gradient
    assert isinstance(recipe, Recipe)
    xs, weights = [], []
    for device in range(DEVICES):
        own = [shards(x)[device] for x in operands.xs]
        xs.append([*map(dequantized, quantize_rows(own, recipe, backward))])
        matrices = [shards(w)[device] for w in ws]
        oriented = [w.T if backward else w for w in matrices]
        sums = [[w] for w in oriented] if site.op == "all_gather_matmul" else [oriented]
        scaled = [dequantized(w) for terms in sums for w in quantize_weights(terms, recipe)]
        weights.append([w.T if backward else w for w in scaled])
    whole = [[np.concatenate(each) for each in zip(*of, strict=True)] for of in (xs, weights)]
    return operands._replace(xs=whole[0]), whole[1]


def gradients_in_8_bits(
    name: str, site: Site, operands: StackOperands, ws: Sequence[Any]
) -> list[np.ndarray]:
    """Weight gradients, of packed rows if the recipe has them in 8 bits."""
    recipe = site.format
    assert isinstance(recipe, Recipe)
    if not site.has_weight_gradient or not recipe.packs_gradients:
        return expected(name, operands, ws)[1]
    xs = shards(operands.aside)
    x_rows = [quantize_rows([x], recipe)[0] for x in xs]
    dys = [[shards(dy)[device] for dy in operands.xs] for device in range(DEVICES)]
    dy_rows = [quantize_rows(each, recipe, True) for each in dys]

    def gradient(device: int, number: int) -> np.ndarray:
        x, sent_x = xs[device], x_rows[device]
        dy, sent_dy = dys[device][number], dy_rows[device][number]
        if site.op == "all_gather_matmul":
            dy, sent_dy = operands.xs[0], joined([each[0] for each in dy_rows])
        else:
            x, sent_x = operands.aside, joined(x_rows)
        return weight_gradient(x, dy, (sent_x, sent_dy), recipe, np.float64)

    devices, numbers = range(DEVICES), range(len(operands.xs))
    return [np.stack([gradient(device, number) for device in devices]) for number in numbers]


def one_repetition(name: str, fp8: RecipeName) -> tuple[Site, Program]:
    """A site, and the program that measures it once."""
    stack = stack_of(name, fp8, jnp.bfloat16)
    stack.repetitions = 1
    return stack.site, Program(stack.program("xla"), stack.operands("xla"))


@every_site
@pytest.mark.parametrize("fp8", SHIPPED_RECIPES)
def test_messages_travel_and_are_multiplied_in_8_bits(name: str, fp8: RecipeName) -> None:
    site, lowered = one_repetition(name, fp8)
    backward = name.endswith("backward")
    products = (GRADIENTS[fp8] if backward else E4M3, E4M3)
    if fp8 == "blockwise":  # XLA has no matmul with scales of blocks.
        products = ("f32", "f32")
    in_8_bits = fp8 == "tensorwise"
    gradients = {E4M3, GRADIENTS[fp8]} if in_8_bits else {"bf16"}
    found = [tuple(map(dtype_of, dot.operands)) for dot in lowered.operations("dot_general")]
    assert found[: len(site.operands)] == [products] * len(site.operands)
    assert {dtype for pair in found[len(site.operands) :] for dtype in pair} == (
        gradients if backward else set()
    )
    gathered = {dtype_of(g.operands[0]) for g in lowered.operations("all_gather")}
    travelling = set()
    if site.op == "all_gather_matmul" or (backward and in_8_bits):
        travelling.add("ui8")
    if backward and not in_8_bits:
        travelling.add("bf16")
    assert gathered == travelling


@every_site
@pytest.mark.parametrize("fp8", SHIPPED_RECIPES)
def test_nothing_is_quantized_while_it_is_timed(name: str, fp8: RecipeName) -> None:
    """But for the dy of weight gradients in 8 bits, whose rows get one scale."""
    _, lowered = one_repetition(name, fp8)
    converted = [dtype_of(c.results[0]) for c in lowered.operations("convert")]
    narrowed = [dtype for dtype in converted if dtype.startswith("f8")]
    gradients = {"gather backward": 2, "scatter backward": 1}.get(name, 0)
    assert narrowed == [GRADIENTS[fp8]] * (gradients if fp8 == "tensorwise" else 0)
