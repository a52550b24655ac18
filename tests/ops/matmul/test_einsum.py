"""collective_einsum: its numbers, what `explain` says of it, and what it refuses.

The search of test_einsum_search.py looks for wrong numbers further.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh
from jax.sharding import PartitionSpec as P

from collective_matmul import collective_einsum, explain
from collective_matmul.ops.matmul.backends import BACKENDS
from tests.conftest import MeshFactory
from tests.dispatch.sites import BFLOAT16, H200
from tests.ops.matmul.einsum_reference import FORMS, EinsumCase, case_of, on_stacks
from tests.ops.matmul.test_transforms import assert_same, result_and_gradients
from tests.reference import AXIS, assert_close, poisoned_results
from tests.rewrite.simulator import simulated_or_compiled

pytestmark = pytest.mark.usefixtures("strict_dtype_promotion")


@pytest.fixture(autouse=True, scope="module")
def _poisoned() -> Iterator[None]:
    with poisoned_results():
        yield


@pytest.fixture
def mesh(make_mesh: MeshFactory) -> Mesh:
    return make_mesh({AXIS: 3})


@pytest.mark.parametrize(
    ("form", "implementation"),
    [
        *itertools.product(FORMS, ("xla", "ring")),
        *itertools.product(
            ("three batch labels", "gathered contracted label", "scattered batch label"),
            ("ring_two_way", "ring_direct"),
        ),
    ],
)
@simulated_or_compiled
def test_every_form(form: str, implementation: str, run: Callable, mesh: Mesh) -> None:
    assert_close(case_of(form, implementation).compare(mesh, run=run))


@pytest.mark.parametrize("implementation", ["xla", "ring"])
def test_products_of_chunks_are_summed_in_float32(
    implementation: str, make_mesh: MeshFactory
) -> None:
    """bfloat16 has no 257, so that 257 + 1 would be 257 or 256 if a chunk's sum were rounded."""
    x = np.array([[[256], [1]], [[1], [0]]], BFLOAT16)
    w = np.ones((2, 4, 1), BFLOAT16)
    fun = on_stacks(
        lambda x, w: collective_einsum(
            "sd,sf->df", x, w, AXIS, gather="s", implementation=implementation
        ),
        make_mesh({AXIS: 2}),
    )
    np.testing.assert_array_equal(jax.jit(fun)(x, w), np.full((2, 1, 1), 258))


@pytest.mark.parametrize(
    ("subscripts", "shapes"),
    [
        ("s...d,df->s...f", ((6, 2, 2, 3), (3, 2))),
        ("...ds, fd -> s...f", ((2, 2, 3, 6), (2, 3))),
        ("...sd,...df->...sf", ((2, 6, 3), (2, 3, 2))),
        ("sd,df", ((6, 3), (3, 2))),
        # A label of one operand alone is summed over, and one that occurs twice is a diagonal.
        ("ksd,dfj->sf", ((2, 6, 3), (3, 2, 5))),
        ("dsd,df->sf", ((3, 6, 3), (3, 2))),
    ],
)
def test_subscripts_of_numpy(subscripts: str, shapes: tuple, make_mesh: MeshFactory) -> None:
    """With whole numbers, of which all sums are exact."""
    generator = np.random.default_rng(0)
    x, w = (generator.integers(-4, 5, shape).astype(np.float32) for shape in shapes)
    fun = jax.shard_map(
        lambda x, w: collective_einsum(subscripts, x, w, AXIS, gather="s", implementation="ring"),
        mesh=make_mesh({AXIS: 2}),
        in_specs=(P(*(AXIS if size == 6 else None for size in x.shape)), P()),
        out_specs=P(),
        check_vma=False,
    )
    np.testing.assert_array_equal(jax.jit(fun)(x, w), np.einsum(subscripts, x, w))


def test_labels_of_one_operand_are_summed_in_float32(make_mesh: MeshFactory) -> None:
    """bfloat16 has no 257, so that 256 + 1 + 1 would be 256 if it were rounded on the way."""
    x = np.array([[[256, 1, 1]]], BFLOAT16)
    fun = on_stacks(
        lambda x, w: collective_einsum("sk,df->sf", x, w, AXIS, gather="s"),
        make_mesh({AXIS: 1}),
    )
    assert jax.jit(fun)(x, np.ones((1, 1, 1), BFLOAT16)) == 258


@pytest.mark.parametrize("check_vma", [True, False])
def test_second_derivatives_under_vmap(check_vma: bool, make_mesh: MeshFactory) -> None:
    """Reverse over reverse, the label contracted, an axis of x mapped."""

    def einsum(x: jax.Array, w: jax.Array) -> jax.Array:
        return collective_einsum("sd,sf->df", x, w, AXIS, gather="s", implementation="ring")

    def penalty(fun: Callable, x: jax.Array, w: jax.Array) -> jax.Array:
        gradients = jax.grad(lambda x, w: jnp.sum(jnp.tanh(fun(x, w))), (0, 1))(x, w)
        return jnp.concatenate([jnp.ravel(gradient) for gradient in gradients])

    def unsharded(x: jax.Array, w: jax.Array) -> jax.Array:
        whole = jnp.moveaxis(x, 0, 1).reshape(3, 4, 3)
        return jnp.einsum("bsd,zsf->zbdf", whole, w)

    sharded = on_stacks(jax.vmap(einsum, (0, None)), make_mesh({AXIS: 2}), check_vma=check_vma)
    generator = np.random.default_rng(0)
    x, w = (generator.standard_normal(shape, np.float32) for shape in ((2, 3, 2, 3), (2, 4, 2)))
    assert_same(
        *(
            result_and_gradients(functools.partial(penalty, fun), x, w)
            for fun in (sharded, unsharded)
        )
    )


@pytest.mark.parametrize("implementation", ["xla", "ring"])
@pytest.mark.parametrize("operand", ["x", "w"])
def test_gradients_of_replicated_operands_are_summed(
    implementation: str, operand: str, mesh: Mesh
) -> None:
    """By the types alone: an operand that no axis shards is the same array on every device."""
    sharded = jax.shard_map(
        lambda x, w: collective_einsum(
            "sd,sf->df", x, w, AXIS, gather="s", implementation=implementation
        )[None],
        mesh=mesh,
        in_specs=(P(), P(AXIS)) if operand == "x" else (P(AXIS), P()),
        out_specs=P(AXIS),
    )

    def unsharded(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.broadcast_to(jnp.einsum("sd,sf->df", x, w), (3, 4, 2))

    generator = np.random.default_rng(0)
    x, w = (generator.standard_normal(shape, np.float32) for shape in ((6, 4), (6, 2)))
    assert_same(result_and_gradients(sharded, x, w), result_and_gradients(unsharded, x, w))


def explained(case: EinsumCase, mesh: Mesh | AbstractMesh) -> list[tuple[str, str]]:
    """Op and shapes of both passes."""
    x, w, dy = (jax.ShapeDtypeStruct(a.shape, a.dtype) for a in case.arrays(0))
    fun = on_stacks(lambda x, w, dy: jax.vjp(case.call, x, w)[1](dy), mesh)
    sites = [decision.site for decision in explain(fun)(x, w, dy).decisions]
    assert [site.direction for site in sites] == ["forward", "backward"]
    assert all("einsum_reference.py" in str(site.source) for site in sites)
    return [(site.op, site.shapes) for site in sites]


@pytest.mark.parametrize(
    ("form", "forward", "backward"),
    [
        (
            "gathered matmul",
            ("all_gather_matmul", "float32 [2,3,4]@[4,4] over tensor=3"),
            ("matmul_reduce_scatter", "float32 [2,9,4]@[4,4], with [2,3,4] over tensor=3"),
        ),
        (
            "gathered matmul, w moved",
            ("all_gather_matmul", "float32 [2,3,4]@[4,4], hdk transposed over tensor=3"),
            (
                "matmul_reduce_scatter",
                "float32 [2,9,4]@[4,4], with [2,3,4], hdk transposed over tensor=3",
            ),
        ),
        (
            "gathered contracted label",
            ("all_gather_matmul", "float32 sd,sf->df [3,4],[9,5] over tensor=3"),
            ("matmul_reduce_scatter", "float32 [9,5]@[5,4], with [3,4] over tensor=3"),
        ),
        (
            "scattered batch label",
            (
                "matmul_reduce_scatter",
                "float32 ced,dfe->cfe [2,9,4],[4,5,9], dfe and cfe transposed over tensor=3",
            ),
            (
                "all_gather_matmul",
                "float32 cfe,dfe->ced [2,5,3],[4,5,9], gathered kept, cfe and dfe transposed"
                " over tensor=3",
            ),
        ),
    ],
)
def test_explain_tells_einsums_from_matmuls_and_what_is_moved(
    form: str, forward: tuple[str, str], backward: tuple[str, str], mesh: Mesh
) -> None:
    assert explained(case_of(form, None), mesh) == [forward, backward]


def test_einsums_are_decided_by_the_cost_model() -> None:
    """No table knows them. Sums of chunks in float32 are dear; places side by side are not."""
    mesh = AbstractMesh((4,), (AXIS,), axis_types=(AxisType.Auto,), abstract_device=H200)

    def decide(subscripts: str, *shapes: tuple[int, ...]):
        def fun(x: jax.Array, w: jax.Array) -> jax.Array:
            return collective_einsum(subscripts, x, w, AXIS, gather="s")

        structs = (jax.ShapeDtypeStruct((4, *shape), BFLOAT16) for shape in shapes)
        (decision,) = explain(on_stacks(fun, mesh))(*structs).decisions
        assert decision.reason.startswith("cost model")
        return decision

    stands = decide("sd,df->fs", (2048, 8192), (8192, 7168))
    summed = decide("sd,sf->df", (2048, 8192), (8192, 7168))
    assert stands.site.flops == summed.site.flops
    assert stands.site.bytes_communicated == summed.site.bytes_communicated
    assert (stands.implementation, summed.implementation) == ("ring", "xla")
    assert stands.seconds and summed.seconds and stands.seconds < summed.seconds


# Refusals. Everything is only traced, so each is refused before anything is compiled.


def zeros(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.zeros(shape, dtype)


@pytest.fixture
def refused(make_mesh: MeshFactory) -> Callable[..., None]:
    """Traces `collective_einsum` on four devices and expects just this sentence."""

    def check(subscripts: str, x: Any, w: Any, sentence: str, **keywords: Any) -> None:
        fun = jax.shard_map(
            lambda: collective_einsum(subscripts, x, w, AXIS, **keywords),
            mesh=make_mesh({AXIS: 4}),
            in_specs=(),
            out_specs=P(),
            check_vma=False,
        )
        # JAX adds notes of its own on lines that follow.
        with pytest.raises((TypeError, ValueError), match=rf"^{re.escape(sentence)}(\n|$)"):
            jax.eval_shape(fun)

    return check


@pytest.mark.parametrize(
    ("keywords", "sentence"),
    [
        (
            {},
            "gather=None, scatter=None: expected one of them, and not the other, to name a label;"
            " an einsum that communicates nothing is jax.numpy.einsum",
        ),
        (
            {"gather": "s", "scatter": "f"},
            "gather='s', scatter='f': expected one of them, and not the other, to name a label;"
            " an einsum that communicates nothing is jax.numpy.einsum",
        ),
        ({"gather": "sd"}, "gather='sd': expected one of the labels of 'sd,df->sf'"),
        ({"scatter": "x"}, "scatter='x': expected one of the labels of 'sd,df->sf'"),
        ({"scatter": 0}, "scatter=0: expected one of the labels of 'sd,df->sf'"),
        (
            {"scatter": "d"},
            "scatter='d': the result of 'sd,df->sf' does not have it; expected a label of the"
            " result",
        ),
        (
            {"scatter": "s"},
            "scatter='s': size 6 is not divisible by axis 'tensor' of size 4; pad it to 8",
        ),
        (
            {"gather": "d"},
            "gather='d': size 2 in x and 2 in w; expected one to be a shard of the other, 1/4 of"
            " it by axis 'tensor'; if both are shards, call jax.numpy.einsum first, and then"
            " jax.lax.psum or all_gather",
        ),
        (
            {"gather": "s", "implementation": "rings"},
            "implementation='rings': expected None (choose per shape), or one or several"
            f" of {', '.join(BACKENDS)}",
        ),
    ],
)
def test_labels_that_do_not_fit(keywords: dict, sentence: str, refused: Callable) -> None:
    refused("sd,df->sf", zeros(6, 2), zeros(2, 3), sentence, **keywords)


@pytest.mark.parametrize(
    ("subscripts", "x", "w", "sentence"),
    [
        (
            "ssd,df->sf",
            zeros(4, 4, 2),
            zeros(2, 3),
            "gather='s': an operand of 'ssd,df->sf' has it twice, so that its shards lack parts of"
            " the diagonal; gather the operand with jax.lax.all_gather",
        ),
        (
            "sd,df->f",
            zeros(4, 2),
            zeros(2, 3),
            "gather='s': 'sd,df->f' sums one operand alone over it; use jax.numpy.sum, and"
            " jax.lax.psum over the axis, which communicate less",
        ),
        (
            "sd,df->sf",
            zeros(0, 2),
            zeros(2, 3),
            "gather='s': size 0; expected at least 1 on every device",
        ),
        (
            "sd,df->sf",
            zeros(4, 2),
            zeros(3, 5),
            "w: label 'd' of 'df' has size 3, and in x ('sd') 2; expected the same",
        ),
        (
            "sdd,df->sf",
            zeros(4, 3, 2),
            zeros(2, 5),
            "x: shape (4, 3, 2) with labels 'sdd', one of which has two sizes; expected the same"
            " wherever a label occurs",
        ),
        (
            "sd,df->sf",
            zeros(4, 2),
            zeros(2, 3, dtype=BFLOAT16),
            "x is float32 and w is bfloat16; cast one, so that what is communicated has the dtype"
            " you mean",
        ),
        (
            "sd,df->sf",
            zeros(4, 2, dtype=np.int32),
            zeros(2, 3, dtype=np.int32),
            "x and w are int32; expected a floating-point dtype: float32, bfloat16, float16,"
            " float64",
        ),
        ("sd,df->sf", [[1.0]], zeros(2, 3), "x: a list; expected an array"),
        (
            "sd->s",
            zeros(4, 2),
            zeros(2, 3),
            "subscripts='sd->s': 1 operand(s); expected two, separated by a comma, as in"
            " 'sd,df->sf'",
        ),
    ],
)
def test_operands_that_do_not_fit(
    subscripts: str, x: Any, w: Any, sentence: str, refused: Callable
) -> None:
    refused(subscripts, x, w, sentence, gather="s")


def test_nothing_to_scatter(refused: Callable) -> None:
    sentence = "scatter='s': size 0; expected at least 4"
    refused("sd,df->sf", zeros(0, 2), zeros(2, 3), sentence, scatter="s")


def test_an_axis_that_there_is_not() -> None:
    with pytest.raises(NameError, match=r"^axis_name='tensor': no such axis here"):
        collective_einsum("sd,df->sf", jnp.ones((4, 2)), jnp.ones((2, 3)), AXIS, gather="s")
