"""Arguments that do not fit: the sentence names the argument, its value, and what to do.

Everything is only traced, so each is refused before anything is compiled.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax.sharding import PartitionSpec as P

from collective_matmul import (
    UnknownBackendError,
    all_gather_matmul,
    layers,
    matmul_all_reduce,
    matmul_reduce_scatter,
    overlap,
    overlap_jit,
    tune,
)
from collective_matmul.dispatch.recording import record_decisions
from collective_matmul.ops.matmul import checks
from collective_matmul.ops.matmul.backends import BACKENDS
from collective_matmul.ops.matmul.ring.backend import RINGS
from tests.conftest import MeshFactory
from tests.reference import AXIS, PORTABLE

OPS = (all_gather_matmul, matmul_reduce_scatter, matmul_all_reduce)
every_op = pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__)


def zeros(*shape: int, dtype: str = "float32") -> np.ndarray:
    return np.zeros(shape, jnp.dtype(dtype))


@pytest.fixture
def refused(make_mesh: MeshFactory) -> Callable[..., None]:
    """Traces `op(x, w)` on four devices and expects just this sentence."""

    def check(op: Callable, x: Any, w: Any, error: type[Exception], sentence: str) -> None:
        mesh = make_mesh({AXIS: 4})
        fun = jax.shard_map(op, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
        # JAX adds notes of its own on lines that follow.
        with pytest.raises(error, match=rf"^{re.escape(sentence)}(\n|$)"):
            jax.eval_shape(fun, x, w)

    return check


@every_op
@pytest.mark.parametrize("axis_name", [(AXIS,), None, 0], ids=str)
def test_axis_name_is_a_string(
    op: Callable, axis_name: object, refused: Callable[..., None]
) -> None:
    sentence = f"axis_name={axis_name!r}: expected the name of one mesh axis, a string"
    refused(partial(op, axis_name=axis_name), zeros(4, 2), zeros(2, 3), TypeError, sentence)


@every_op
def test_an_array_as_axis_name_is_named_by_its_type(
    op: Callable, refused: Callable[..., None]
) -> None:
    """The weights in the place of the axis: their elements would hide the sentence."""
    sentence = "axis_name=an array float32[20,30]: expected the name of one mesh axis, a string"
    for array in (jnp.zeros((20, 30)), np.zeros((20, 30), np.float32)):
        fun = partial(op, axis_name=array)
        refused(fun, zeros(4, 2), zeros(2, 3), TypeError, sentence)


@every_op
def test_axis_exists(op: Callable, refused: Callable[..., None]) -> None:
    sentence = (
        "axis_name='model': no such axis here (there are ('tensor',)); call this inside"
        " jax.shard_map over a mesh with that axis"
    )
    refused(partial(op, axis_name="model"), zeros(4, 2), zeros(2, 3), NameError, sentence)


@every_op
def test_outside_shard_map(op: Callable) -> None:
    sentence = r"^axis_name='tensor': no such axis here \(there are \(\)\); call this inside jax"
    with pytest.raises(NameError, match=sentence):
        op(zeros(4, 2), zeros(2, 3), AXIS)


@every_op
def test_implementation_exists(op: Callable, refused: Callable[..., None]) -> None:
    sentence = (
        "implementation={!r}: expected None (choose per shape), or one or several of "
        + ", ".join(BACKENDS)
    )
    for wrong in ("rings", ("ring", "rings"), (), 3, (None,)):
        fun = partial(op, axis_name=AXIS, implementation=wrong)
        refused(fun, zeros(4, 2), zeros(2, 3), ValueError, sentence.format(wrong))


def test_the_error_of_an_unknown_name_has_those_that_are_known() -> None:
    with pytest.raises(UnknownBackendError) as error:
        overlap(zeros, implementation="rings")
    assert error.value.known == (*BACKENDS,)


def test_requested_names_become_a_tuple_that_can_be_hashed() -> None:
    assert checks.implementation(None) is None
    for value in ("ring", ["ring"], ("ring",)):
        assert checks.implementation(value) == ("ring",)


@every_op
def test_the_name_of_an_earlier_release_is_still_accepted(op: Callable, make_mesh) -> None:
    fun = partial(op, axis_name=AXIS, implementation=["bulk", "ring"])
    mapped = jax.shard_map(
        fun, mesh=make_mesh({AXIS: 4}), in_specs=(P(), P()), out_specs=P(), check_vma=False
    )
    with (
        pytest.warns(DeprecationWarning, match="'bulk' is now called 'xla'"),
        record_decisions() as decisions,
    ):
        jax.eval_shape(mapped, zeros(4, 2), zeros(2, 3))
    assert [decision.implementation for decision in decisions] == ["xla"]


@pytest.mark.parametrize(
    "call",
    [
        lambda: overlap(jnp.sin, implementation="bulk"),
        lambda: overlap_jit(jnp.sin, fused=False),
        lambda: layers.ColumnParallelLinear(2, 3, implementation="bulk", rngs=nnx.Rngs(0)),
        lambda: layers.ParallelModule(linen.Dense(3), {}, implementation="bulk"),
        lambda: tune([], implementations=["bulk"], groups=1, devices=[]),
    ],
    ids=["overlap", "overlap_jit", "nnx", "linen", "tune"],
)
def test_the_warning_about_a_name_shows_the_line_of_the_user(call: Callable[[], Any]) -> None:
    with pytest.warns(DeprecationWarning, match="is now called") as found, suppress(ValueError):
        call()
    assert [warning.filename for warning in found] == [__file__]


@every_op
@pytest.mark.parametrize(
    ("x", "w", "error", "sentence"),
    [
        (
            zeros(4),
            zeros(4, 3),
            ValueError,
            "x: shape (4,) has 1 dimension(s); expected [..., m, ..., K] with at least 2; add a"
            " leading dimension",
        ),
        (
            zeros(4, 2),
            zeros(2),
            ValueError,
            "w: shape (2,); expected [K, *N] with at least 2 dimensions",
        ),
        (
            zeros(4, 2),
            zeros(3, 5),
            ValueError,
            "w: shape (3, 5) has 3 rows, x (4, 2) has 2 columns; expected the contracted"
            " dimension, x's last and w's first, to agree",
        ),
        (
            zeros(4, 2, dtype="bfloat16"),
            zeros(2, 3),
            TypeError,
            "x is bfloat16 and w is float32; cast one, so that what is communicated has the dtype"
            " you mean",
        ),
        (
            zeros(4, 2, dtype="int8"),
            zeros(2, 3, dtype="int8"),
            TypeError,
            "x and w are int8; expected a floating-point dtype: float32, bfloat16, float16,"
            " float64",
        ),
    ],
    ids=["x-is-a-vector", "w-is-a-vector", "contraction", "dtypes-differ", "integers"],
)
def test_operands_fit(
    op: Callable,
    x: np.ndarray,
    w: np.ndarray,
    error: type[Exception],
    sentence: str,
    refused: Callable[..., None],
) -> None:
    refused(partial(op, axis_name=AXIS), x, w, error, sentence)


def test_every_weight_of_several_is_checked(refused: Callable[..., None]) -> None:
    weights = (zeros(2, 3), zeros(7, 3))
    sentence = (
        "w: shape (7, 3) has 7 rows, x (4, 2) has 2 columns; expected the contracted dimension,"
        " x's last and w's first, to agree"
    )
    fun = partial(all_gather_matmul, axis_name=AXIS)
    refused(fun, zeros(4, 2), weights, ValueError, sentence)


def test_at_least_one_weight(refused: Callable[..., None]) -> None:
    sentence = "w=(): expected a weight or a sequence of at least one"
    refused(partial(all_gather_matmul, axis_name=AXIS), zeros(4, 2), (), ValueError, sentence)


@pytest.mark.parametrize(
    ("op", "argument"),
    [(all_gather_matmul, "gather_dimension"), (matmul_reduce_scatter, "scatter_dimension")],
)
@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (3, "x has shape (4, 4, 2); expected a dimension from 0 to 1"),
        (-4, "x has shape (4, 4, 2); expected a dimension from 0 to 1"),
        (2, "that is the contracted dimension of x (4, 4, 2); expected one from 0 to 1"),
        (-1, "that is the contracted dimension of x (4, 4, 2); expected one from 0 to 1"),
    ],
)
def test_dimension(
    op: Callable, argument: str, value: int, problem: str, refused: Callable[..., None]
) -> None:
    fun = partial(op, axis_name=AXIS, **{argument: value})
    refused(fun, zeros(4, 4, 2), zeros(2, 3), ValueError, f"{argument}={value}: {problem}")


@pytest.mark.parametrize(
    ("op", "argument"),
    [(all_gather_matmul, "gather_dimension"), (matmul_reduce_scatter, "scatter_dimension")],
)
def test_a_dimension_is_not_empty(
    op: Callable, argument: str, refused: Callable[..., None]
) -> None:
    sentence = (
        f"{argument}=1: size 0 in x (4, 0, 2); expected at least 1 on every device; leave the op"
        " out where there is nothing to communicate"
    )
    fun = partial(op, axis_name=AXIS, **{argument: 1})
    refused(fun, zeros(4, 0, 2), zeros(2, 3), ValueError, sentence)


@pytest.mark.parametrize("implementation", [None, *PORTABLE])
def test_scattered_dimension_divides(
    implementation: str | None, refused: Callable[..., None]
) -> None:
    sentence = (
        "scatter_dimension=1: size 7 is not divisible by axis 'tensor' of size 4; pad it to 8"
    )
    fun = partial(
        matmul_reduce_scatter, axis_name=AXIS, scatter_dimension=1, implementation=implementation
    )
    refused(fun, zeros(4, 7, 2), zeros(2, 3), ValueError, sentence)


@pytest.mark.parametrize("implementation", RINGS)
def test_a_ring_asked_for_by_name_must_be_able_to_run(
    implementation: str, refused: Callable[..., None]
) -> None:
    sentence = (
        f"implementation={implementation!r}: 6 rows are not divisible by axis 'tensor' of size 4;"
        " for matmul_all_reduce float32 [2,3,2]@[2,5] over tensor=4; pass"
        f" ({implementation!r}, 'xla') to use the first that can, or None to choose per shape"
    )
    fun = partial(matmul_all_reduce, axis_name=AXIS, implementation=implementation)
    refused(fun, zeros(2, 3, 2), zeros(2, 5), ValueError, sentence)


@pytest.mark.parametrize("value", [None, 0.0, "0"])
def test_a_dimension_is_a_whole_number(value) -> None:
    x = np.zeros((4, 2), np.float32)
    with pytest.raises(TypeError, match=r"gather_dimension=.*: expected a whole number"):
        checks.dimension("gather_dimension", value, x)  # pyright: ignore[reportArgumentType]


def test_operands_are_arrays_of_a_dtype_that_is_communicated() -> None:
    x = np.zeros((4, 2), np.float32)
    with pytest.raises(TypeError, match="x: a list; expected an array"):
        checks.operands([[0.0]], (x,))  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="w: a dict; expected an array"):
        checks.operands(x, ({},))  # pyright: ignore[reportArgumentType]
    eighth = jnp.zeros((4, 4), jnp.float8_e4m3fn)
    with pytest.raises(TypeError, match="float8_e4m3fn; expected a floating-point dtype: float32"):
        checks.operands(eighth, (eighth,))
