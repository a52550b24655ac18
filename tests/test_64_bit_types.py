"""Programs with JAX's 64-bit types, which JAX_ENABLE_X64 enables: Python's integers are int64 then.

The first tests enable them here, for what float64 operands do. The last ones run others of this
suite in a process of their own. ``JAX_ENABLE_X64=1 pytest`` runs any of them so.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from collective_matmul import all_gather_matmul, collective_einsum, explain, overlap, prequantize
from tests.conftest import MeshFactory
from tests.covering import pairwise
from tests.fp8_reference import SHIPPED_RECIPES
from tests.reference import AXIS, OPS, PORTABLE, Case

DEVICES = 2
#: Roundings of float64, in units of the largest number. float32 would be off by 1e-8 at least.
TOLERANCE = 1e-12

#: Tests that the default suite runs, some of each part that computes places in arrays.
COVERING = (
    "tests/ops/matmul/test_ops.py::test_forward",
    "tests/ops/matmul/test_ops.py::test_gradients",
    "tests/ops/matmul/test_sharded_weights.py::test_values_and_gradients",
    "tests/models/layers/test_vocabulary.py",
    "tests/models/generation/test_valid_attention.py::test_kernels_lower_for_cuda",
    "tests/models/generation/test_generation.py::test_likeliest_tokens_are_those_of_the_reference[window-2]",
    "tests/train/test_step.py::test_every_site_of_a_plain_model_is_replaced[{}-0]",
    "tests/mosaic_gpu/hopper_matmul/test_lowering.py::test_ring[ring-all_gather_matmul]",
    "tests/mosaic_gpu/hopper_matmul/test_lowering.py::test_ring[ring-matmul_reduce_scatter]",
)
GENERATED = "tests/models/generation/test_generation.py::test"
#: What `.ci/run` adds: programs that compute places in arrays, counters of loops and indices of
#: gathers. Kernels have no 64-bit types, so tests that simulate these are left out. All are tests
#: that run by default: those marked exhaustive would be left out without a word.
MORE = (
    *(f"tests/ops/matmul/test_{name}.py" for name in ("ops", "einsum", "control_flow")),
    *(
        f"tests/ops/matmul/test_transforms.py::test_{name}"
        for name in ("scan_over_checkpointed_layers", "vmap", "rings_over_two_axes_in_one_program")
    ),
    "tests/ops/matmul/test_quantized_weights.py::test_results_and_gradients_are_those_of_arrays",
    "tests/ops/matmul/test_fp8_ops.py::test_shards_of_weights_are_quantized_as_the_whole",
    *(
        f"tests/layers/linear/test_linear.py::test_{name}"
        for name in (
            "results_and_gradients_equal_those_of_flax",
            "more_devices_than_key_value_heads_compute_copies",
            "a_sequence_that_the_axis_does_not_divide_is_whole_on_every_device",
        )
    ),
    "tests/rewrite/test_overlap.py",
    *(
        f"tests/rewrite/test_explicit_programs.py::test_values_gradients_and_types_stay_the_same[{form}]"
        for form in ("attention", "gated", "layers", "in_calls", "fsdp_block", "fsdp_axis")
    ),
    "tests/rewrite/test_weight_gathers.py::test_values_and_gradients_stay_the_same",
    "tests/ops/attention/test_attend.py",
    f"{GENERATED}_drawn_tokens_depend_on_the_seed_and_not_on_the_mesh",
    f"{GENERATED}_tokens_are_drawn_as_often_as_their_probability",
    "tests/models/blocks/test_loop.py",
    # Whole steps: rewritten over both kinds of axes, and with shards and microbatches.
    "tests/train/test_step.py::test_a_rewritten_step_has_the_same_loss_curve_as_one_device",
    "tests/train/parallel/test_explicit_step.py::test_shards_of_weights_do_not_change_the_losses"
    "[(2, 2, 2)-{'zero': 2, 'gradient_accumulation_steps': 2}]",
    *(
        f"tests/train/optimizer/test_muon.py::test_{name}"
        for name in ("it_equals_optax_on_every_mesh", "experts_are_matrices_wherever_they_are")
    ),
    "tests/train/parallel/test_zero.py::test_gradients_travel_and_are_summed_in_the_dtype_asked_for",
)
ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True, scope="module")
def _with_64_bit_types() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def arrays(*shapes: tuple[int, ...]) -> list[np.ndarray]:
    generator = np.random.default_rng(0)
    return [generator.standard_normal(shape) for shape in shapes]


def assert_in_float64(actual: Any, expected: Any) -> None:
    actual, expected = jax.tree.leaves(actual), jax.tree.leaves(expected)
    for a, b in zip(actual, expected, strict=True):
        assert a.dtype == jnp.float64
        assert np.max(np.abs(np.asarray(a) - b)) <= TOLERANCE * np.max(np.abs(b))


@pairwise(op=OPS, implementation=[None, *PORTABLE], dimension=[0, 1])
def test_ops_keep_float64(
    op: str, implementation: str | None, dimension: int, make_mesh: MeshFactory
) -> None:
    leading = (2 * DEVICES, 2 * DEVICES)
    case = Case(op, implementation, DEVICES, leading, 4, ((4,),), dimension, dtype="float64")
    compared = case.compare(make_mesh({AXIS: DEVICES}))
    assert_in_float64(compared.actual, compared.expected)


@pytest.mark.parametrize("implementation", PORTABLE)
def test_einsums_keep_float64(implementation: str, make_mesh: MeshFactory) -> None:
    """A batch of matmuls, of which a batch dimension is gathered."""
    x, w = arrays((4, 3, 4), (4, 4, 6))

    def einsum(x: jax.Array, w: jax.Array) -> jax.Array:
        options: dict[str, Any] = {"gather": "b", "implementation": implementation}
        return collective_einsum("bsd,bdf->bsf", x, w, AXIS, **options)

    fun = jax.shard_map(
        einsum,
        mesh=make_mesh({AXIS: DEVICES}),
        in_specs=(P(AXIS), P(None, None, AXIS)),
        out_specs=P(None, None, AXIS),
    )
    assert_in_float64(jax.jit(fun)(x, w), np.einsum("bsd,bdf->bsf", x, w))


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("implementation", ["xla", "ring"])
def test_float64_weights_that_an_axis_shards(
    implementation: str, dtype: str, make_mesh: MeshFactory
) -> None:
    """They are cast to x's dtype; their gradients are summed in their own."""
    x, w = arrays((8, 4), (4, 6))
    x = x.astype(dtype)

    def layer(x: jax.Array, w: jax.Array) -> jax.Array:
        options: dict[str, Any] = {"weight_axis_name": "data", "implementation": implementation}
        return all_gather_matmul(x, w, AXIS, **options)

    fun = jax.shard_map(
        layer,
        mesh=make_mesh({AXIS: 2, "data": 2}),
        in_specs=(P(("data", AXIS)), P("data", AXIS)),
        out_specs=P("data", AXIS),
    )
    y, transpose = jax.vjp(jax.jit(fun), x, w)
    dx, dw = transpose(jnp.ones_like(y))
    assert (y.dtype, dx.dtype, dw.dtype) == (dtype, dtype, "float64")
    expected_dw = np.repeat(x.sum(0, dtype=float)[:, None], 6, 1)
    # float32 sums of 8 numbers below 4 in magnitude.
    tolerance = TOLERANCE if dtype == "float64" else 1e-5
    for actual, expected in ((y, x @ w), (dw, expected_dw)):
        assert np.max(np.abs(np.asarray(actual) - expected)) <= tolerance


def test_operands_of_two_dtypes_are_refused(make_mesh: MeshFactory) -> None:
    x, w = arrays((4, 4), (4, 4))
    fun = jax.shard_map(
        lambda x, w: all_gather_matmul(x, w, AXIS),
        mesh=make_mesh({AXIS: DEVICES}),
        in_specs=(P(AXIS), P(None, AXIS)),
        out_specs=P(None, AXIS),
    )
    with pytest.raises(TypeError, match="x is float64 and w is float32; cast one"):
        fun(x, w.astype("float32"))


@pytest.mark.parametrize("recipe", SHIPPED_RECIPES)
def test_fp8_refuses_float64(recipe: Any, make_mesh: MeshFactory) -> None:
    """Whose larger numbers would become NaN, as float32 scales cannot hold them."""

    def run(body: Any) -> None:
        specs = P(AXIS), P(None, AXIS)
        mesh = make_mesh({AXIS: DEVICES})
        fun = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P(None, AXIS))
        jax.eval_shape(fun, *arrays((4, 4), (4, 4)))

    refused = rf"float64 with fp8='{recipe}', whose scales are float32; cast it to float32"
    with pytest.raises(TypeError, match=f"x: {refused}"):
        run(lambda x, w: all_gather_matmul(x, w, AXIS, fp8=recipe))
    with pytest.raises(TypeError, match=f"x: {refused}"):
        run(lambda x, w: collective_einsum("sd,df->sf", x, w, AXIS, gather="s", fp8=recipe))
    with pytest.raises(TypeError, match=f"w: {refused}"):
        run(lambda x, w: prequantize(w, recipe).array)


@pytest.mark.parametrize("implementation", ["xla", "ring"])
def test_overlap_keeps_float64(implementation: str, make_mesh: MeshFactory) -> None:
    def body(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        whole = lax.all_gather(x, AXIS, tiled=True)
        return lax.psum_scatter(whole @ up @ down, AXIS, tiled=True)

    fun = jax.shard_map(
        body,
        mesh=make_mesh({AXIS: DEVICES}),
        in_specs=(P(AXIS), P(None, AXIS), P(AXIS)),
        out_specs=P(AXIS),
    )
    x, up, down = arrays((4, 4), (4, 6), (6, 4))
    rewritten = overlap(fun, require=2, implementation=implementation)
    assert_in_float64(jax.jit(rewritten)(x, up, down), x @ up @ down)
    quantized = overlap(fun, require=2, fp8="rowwise", implementation=implementation)
    assert_in_float64(jax.jit(quantized)(x, up, down), x @ up @ down)
    assert "float64 has more range than the scales" in str(explain(quantized)(x, up, down))


def run_with_64_bit_types(*tests: str) -> None:
    """Runs tests of this suite in a process whose environment enables 64-bit types."""
    environment = {**os.environ, "JAX_ENABLE_X64": "1"}
    # A worker of pytest-xdist would look for the one that started this process.
    for name in [name for name in environment if name.startswith("PYTEST_")]:
        del environment[name]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider"]
    result = subprocess.run(
        [*command, *tests], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout[-5000:] + result.stderr[-2000:]


def test_a_covering_part_of_the_suite() -> None:
    run_with_64_bit_types(*COVERING)


@pytest.mark.exhaustive
def test_more_of_the_suite() -> None:
    run_with_64_bit_types(*MORE)
