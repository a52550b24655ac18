"""The programs that sites are measured in."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from collective_matmul.dispatch.repetitions import filler
from collective_matmul.dispatch.tables.table import COMPUTE_ONLY
from collective_matmul.operands.format import format_named
from collective_matmul.ops.matmul import model_requests
from collective_matmul.ops.matmul.checks import RecipeName
from collective_matmul.ops.matmul.measured_program import Stack, StackOperands
from collective_matmul.ops.matmul.request import Site
from collective_matmul.ops.matmul.ring.backend import RINGS
from models.families import PRESETS
from tests.fp8_reference import SHIPPED_RECIPES

DEVICES = 2
FLOAT32 = np.dtype("float32")
X = (4, 6)
SITES = {
    "gather": Site("all_gather_matmul", ((X, (6, 3)), (X, (6, 5))), FLOAT32, "", DEVICES),
    "gather backward": Site(
        "matmul_reduce_scatter",
        (((8, 3), (3, 6)), ((8, 5), (5, 6))),
        FLOAT32,
        "",
        DEVICES,
        co_gathered=X,
    ),
    "scatter": Site("matmul_reduce_scatter", (((8, 3), (3, 6)),), FLOAT32, "", DEVICES),
    "scatter backward": Site(
        "all_gather_matmul", ((X, (6, 3)),), FLOAT32, "", DEVICES, keep_gathered=True
    ),
    "reduce": Site("matmul_all_reduce", (((8, 3), (3, 6)),), FLOAT32, "", DEVICES),
}
every_site = pytest.mark.parametrize("name", SITES)
every_recipe = pytest.mark.parametrize("fp8", [None, *SHIPPED_RECIPES])


def stack_of(name: str, fp8: RecipeName | None = None, dtype: Any = FLOAT32) -> Stack:
    site = dataclasses.replace(SITES[name], format=format_named(fp8), dtype=np.dtype(dtype))
    return Stack(site.flat, jax.devices())


def random_operands(stack: Stack) -> StackOperands:
    generator = np.random.default_rng(0)
    return jax.tree.map(
        lambda leaf: generator.standard_normal(leaf.shape, leaf.dtype), stack.plain_operands("xla")
    )


def shards(array: Any) -> np.ndarray:
    """A global array as [device, rows, columns]."""
    return np.asarray(array).reshape(DEVICES, -1, array.shape[-1])


def expected(name: str, operands: StackOperands, ws: Any) -> tuple[list, list]:
    """Products and weight gradients of one repetition, by device."""
    xs, ws = [shards(x) for x in operands.xs], [shards(w) for w in ws]
    aside = None if operands.aside is None else shards(operands.aside)
    if name.endswith("backward"):
        stored, ws = ws, [w.transpose(0, 2, 1) for w in ws]
        assert [w.shape[1:] for w in stored] == [w.shape[:0:-1] for w in ws]

    def gathered(x):
        return np.stack([x.reshape(-1, x.shape[-1])] * DEVICES)

    if name.startswith("gather") != name.endswith("backward"):
        whole = gathered(xs[0])
        gradients = [] if aside is None else [aside.transpose(0, 2, 1) @ whole]
        return [whole @ w for w in ws], gradients
    total = np.sum([x @ w for x, w in zip(xs, ws, strict=True)], axis=(0, 1))
    product = np.stack([total] * DEVICES) if name == "reduce" else total.reshape(DEVICES, -1, 6)
    gradients = [] if aside is None else [gathered(aside).transpose(0, 2, 1) @ x for x in xs]
    return [product], gradients


@every_site
def test_every_repetition_is_the_site_with_weights_of_its_own(name: str) -> None:
    stack = stack_of(name)
    stack.repetitions = 2
    operands = random_operands(stack)
    results = jax.jit(stack.program("xla"))(operands)
    assert len(results) == 2
    for (products, gradients), ws in zip(results, operands.weights, strict=True):
        exact_products, exact_gradients = expected(name, operands, ws)
        assert_close(products, exact_products)
        assert_close(gradients, exact_gradients)


def assert_close(found: Sequence[Any], exact: Sequence[np.ndarray]) -> None:
    assert len(found) == len(exact)
    for actual, wanted in zip(found, exact, strict=True):
        # Sums of at most 8 numbers of size 1, in float32.
        np.testing.assert_allclose(shards(actual), wanted, rtol=1e-4, atol=1e-4)


@every_site
@every_recipe
def test_the_bound_has_the_matmuls_and_no_communication(name: str, fp8: RecipeName | None) -> None:
    stack = stack_of(name, fp8)
    dots = {}
    for implementation in ("xla", COMPUTE_ONLY):
        described = stack.operands(implementation)
        text = jax.jit(stack.program(implementation)).lower(described).as_text()
        dots[implementation] = sorted(
            line.split(":", 1)[1] for line in text.splitlines() if "dot_general" in line
        )
    assert dots[COMPUTE_ONLY] == dots["xla"]
    assert all(word not in text for word in ("all_gather", "reduce_scatter", "all_reduce"))


@every_site
@pytest.mark.parametrize(
    ("implementation", "fp8"),
    [
        *((name, None) for name in ("xla", *RINGS, COMPUTE_ONLY)),
        *(("xla", fp8) for fp8 in SHIPPED_RECIPES),
    ],
)
def test_a_repetition_waits_for_the_products_of_the_one_before(
    name: str, implementation: str, fp8: RecipeName | None
) -> None:
    """The next x comes out of a barrier that the products go into."""
    stack = stack_of(name, fp8)
    jaxpr = jax.make_jaxpr(stack.program(implementation))(stack.operands(implementation))
    (sharded,) = jaxpr.eqns
    body = sharded.params["jaxpr"]
    repetitions = [eqn for eqn in body.eqns if "jaxpr" in eqn.params]
    barriers = [eqn for eqn in body.eqns if eqn.primitive.name == "optimization_barrier"]
    assert len(repetitions) == len(barriers) == stack.repetitions
    products = len(expected_products(stack.site))
    for repetition, barrier in zip(repetitions, barriers, strict=True):
        assert set(repetition.outvars[:products]) <= set(barrier.invars)
    others = len(jax.tree.leaves(stack.operands(implementation)._replace(weights=())))
    for repetition, barrier in zip(repetitions[1:], barriers, strict=False):
        assert repetition.invars[:others] == barrier.outvars[:others]


def expected_products(site: Site) -> list:
    return list(site.operands) if site.op == "all_gather_matmul" else [site]


def test_operands_differ_from_each_other_and_have_no_zeros() -> None:
    stack = Stack(SITES["gather"], jax.devices())
    described = stack.operands("xla")
    arrays = [filler(d)(np.uint32(i)) for i, d in enumerate(jax.tree.leaves(described))]
    for array, leaf in zip(arrays, jax.tree.leaves(described), strict=True):
        assert (array.shape, array.dtype, array.sharding) == (leaf.shape, leaf.dtype, leaf.sharding)
    leaves = [np.asarray(array).ravel() for array in arrays]
    assert len({float(leaf[0]) for leaf in leaves}) == len(leaves)
    assert all(np.all(leaf != 0) for leaf in leaves)
    assert all(0.3 < leaf.std() < 3 for leaf in leaves)


def test_the_dtype_is_that_of_the_site() -> None:
    site = Site("all_gather_matmul", ((X, (6, 3)),), jnp.dtype("bfloat16"), "", DEVICES)
    described = Stack(site, jax.devices()).operands("xla")
    assert {leaf.dtype for leaf in jax.tree.leaves(described)} == {site.dtype}


def test_long_sites_are_repeated_less() -> None:
    def repetitions(rows: int) -> int:
        site = next(model_requests.sites(["llama3-405b"], [rows], DEVICES))
        return Stack(site.flat, jax.devices()).repetitions

    assert [repetitions(rows) for rows in (64, 32768)] == [16, 2]


# Shapes.


def test_layers_of_llama_have_all_forms_of_site() -> None:
    found = list(model_requests.sites(["llama3-8b"], [2048], 4))
    gate_and_up, co_gathering, kept, summed, down, keeping = found[:6]
    shard = (512, 4096)
    assert gate_and_up.operands == kept.operands == ((shard, (4096, 3584)),) * 2
    assert co_gathering.operands == summed.operands == (((2048, 3584), (3584, 4096)),) * 2
    assert (co_gathering.co_gathered, summed.co_gathered) == (shard, None)
    assert (gate_and_up.keep_gathered, kept.keep_gathered) == (False, True)
    assert down.operands == (((2048, 3584), (3584, 4096)),)
    assert keeping.operands == ((shard, (4096, 3584)),)
    assert keeping.keep_gathered
    # A backward has the operations of its forward.
    assert gate_and_up.flops == co_gathering.flops
    assert down.flops == keeping.flops


@pytest.mark.parametrize("fp8", SHIPPED_RECIPES)
def test_layers_with_a_recipe_have_the_forms_that_are_quantized(fp8: RecipeName) -> None:
    """A program that is differentiated already keeps a gathered array, in its own dtype."""
    plain = list(model_requests.sites(["llama3-8b"], [2048, 256], 4))
    found = list(model_requests.sites(["llama3-8b"], [2048, 256], 4, fp8=fp8))
    assert {site.fp8 for site in found} == {fp8}
    forms = [dataclasses.replace(site, format=format_named(None)) for site in found]
    kept = [site for site in plain if site.keep_gathered and site.direction == "forward"]
    assert len(kept) == 3
    if fp8 == "tensorwise":
        assert forms == [site for site in plain if not any(site is each for each in kept)]
    else:
        assert forms == plain


def test_a_backward_pass_is_marked_as_such() -> None:
    """Its x is a gradient, which may have another dtype in 8 bits."""
    for site in model_requests.sites(["square"], [2048], 4, fp8="tensorwise"):
        assert site.has_weight_gradient == (site.direction == "backward")
        x_dtype, _ = site.operand_dtypes
        assert x_dtype == ("float8_e5m2" if site.has_weight_gradient else "float8_e4m3fn")


def test_few_rows_are_decoded() -> None:
    found = [*model_requests.sites(["square"], [256], 4)]
    product = (((256, 2048), (2048, 8192)),)
    assert [(site.op, site.keep_gathered) for site in found] == [
        ("all_gather_matmul", False),
        ("matmul_reduce_scatter", False),
        ("matmul_all_reduce", False),
    ]
    assert found[1].operands == found[2].operands == product
    assert len([*model_requests.sites(["square"], [512], 4)]) == 6


@pytest.mark.parametrize("name", PRESETS)
def test_the_layers_of_a_preset_are_those_of_its_model(name: str) -> None:
    model = PRESETS[name]()
    own, shared = (n * model.head_dim for n in (model.num_heads, model.num_key_value_heads))
    expected = {
        "query, key and value": (model.features, (own, shared, shared)),
        "attention output": (own, (model.features,)),
    }
    if model.num_experts is None:
        expected["gate and up"] = model.features, (model.hidden_features,) * 2
        expected["up"] = model.features, (model.hidden_features,)
        expected["down"] = model.hidden_features, (model.features,)
    layers = model_requests.LAYERS[name]
    assert {layer.name: (layer.contracted, layer.columns) for layer in layers} == expected


def test_sizes_that_the_devices_do_not_divide_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"^layer 'up' with 9 rows: size 9 is not a positive multiple"
    ):
        list(model_requests.sites(["tiny"], [9], 2))
    with pytest.raises(ValueError, match=r"size -8 is not a positive multiple of 2"):
        list(model_requests.sites(["tiny"], [-8], 2))
    with pytest.raises(ValueError, match=r"^shapes='gpt': expected one of llama3-8b, .*, tiny$"):
        list(model_requests.sites(["gpt"], [8], 2))
    with pytest.raises(ValueError, match=r"^shapes='llama3-9b': .*; did you mean llama3-8b\?$"):
        list(model_requests.sites(["llama3-8b", "llama3-9b"], [8], 2))
    with pytest.raises(ValueError, match=r"^devices=1: expected at least 2, .*give --devices"):
        list(model_requests.sites(["tiny"], [8], 1))
    with pytest.raises(ValueError, match=r"^fp8='int8': expected None .*'tensorwise'"):
        list(model_requests.sites(["tiny"], [8], 2, fp8="int8"))  # type: ignore[arg-type]
