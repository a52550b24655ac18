"""Lines of the table for plain gathers and sums, and for those that `overlap` replaced."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from collective_matmul import explain, matmul_all_reduce, overlap
from collective_matmul.explain import Explanation
from collective_matmul.rewrite import find_sites
from tests.conftest import MeshFactory
from tests.dispatch.sites import BFLOAT16, H200
from tests.explained import WIDE, flat_arguments, lines_of, plain
from tests.hopper import HAS_KERNELS
from tests.reference import AXIS


def test_what_overlap_would_do_with_a_plain_program(make_mesh: MeshFactory) -> None:
    explanation = explain(plain(make_mesh({AXIS: 2})), verbose=True)(*flat_arguments())
    assert explanation.decisions == ()
    _, gather, scatter, psum, totals = [
        re.split(r"  +", line) for line in explanation.table(WIDE).splitlines()
    ]
    for line in (gather, scatter, psum):
        assert re.fullmatch(r".*explained\.py:\d+ in plain_block", line[1])
    would = ["xla, with overlap", "on cpu nothing runs under a matmul"]
    shapes = "float32 [4,4]@[4,6] over tensor=2"
    assert gather[2:] == ["all_gather_matmul", shapes, *would]
    assert scatter[2] == "matmul_reduce_scatter" and scatter[4:] == would
    assert psum[2:5] == ["psum", "float32 [] over tensor", "left alone"]
    reason = r"the summed array comes from reduce_sum at explained\.py:\d+, not from a matmul; .*"
    assert re.fullmatch(reason, psum[5])
    total = (
        "3 plain gathers and sums: 2 sites; pass the function to overlap to replace them; 1 left"
    )
    assert totals == [f"{total} alone"]
    # What is left alone is a number, unless a list is asked for.
    (_, *lines, total_alone) = replace(explanation, verbose=False).table(WIDE).splitlines()
    assert [re.split(r"  +", line) for line in lines] == [gather, scatter]
    assert total_alone == f"{total} alone (explain(fun, verbose=True) lists it)"
    *_, total_of_a_program = replace(explanation, verbose=False).table(WIDE, "--all").splitlines()
    assert total_of_a_program == f"{total} alone (--all lists it)"


def test_a_program_without_sites_has_a_total_alone(make_mesh: MeshFactory) -> None:
    sums = jax.shard_map(
        lambda x: lax.psum(x, AXIS), mesh=make_mesh({AXIS: 2}), in_specs=P(AXIS), out_specs=P()
    )
    total = "1 plain gather or sum: 1 left alone"
    assert str(explain(sums)(jnp.ones(4))) == f"{total} (explain(fun, verbose=True) lists it)"
    *_, last = str(explain(sums, verbose=True)(jnp.ones(4))).splitlines()
    assert last == total


def test_sites_that_keep_their_equations_are_counted_apart(make_mesh: MeshFactory) -> None:
    site, *_ = explain(plain(make_mesh({AXIS: 2})))(*flat_arguments()).plain
    kept = replace(site, kept=True, runs=3)
    explanation = Explanation((), (kept,), {kept.line: 3})
    *_, total = explanation.table(WIDE).splitlines()
    counted = "1 site, 3 runs (require counts the sites)"
    own = "on these devices overlap keeps the program's own collectives"
    assert total == f"1 plain gather or sum: {counted}; {own}"


def test_require_counts_as_many_sites_as_explain_says(make_mesh: MeshFactory) -> None:
    """Weights that are gathered inside a loop are sites of which some are kept."""
    mesh = make_mesh({"fsdp": 2, AXIS: 2})

    def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        w = lax.all_gather(w, "fsdp", axis=0, tiled=True)
        h = jnp.dot(lax.all_gather(x, AXIS, axis=0, tiled=True), w)
        return x + lax.psum_scatter(h, AXIS, scatter_dimension=0, tiled=True), None

    def loss(ws: jax.Array, x: jax.Array) -> jax.Array:
        return jax.grad(lambda ws: jnp.sum(lax.scan(jax.checkpoint(layer), x, ws)[0]))(ws)

    specs = P(None, "fsdp", None), P(AXIS, None)
    f = jax.shard_map(loss, mesh=mesh, in_specs=specs, out_specs=specs[0], check_vma=False)
    arguments = jnp.ones((3, 8, 8)), jnp.ones((8, 8))
    explanation = explain(f)(*arguments)
    assert any(site.kept for site in explanation.plain)
    total = " ".join(str(explanation).split())
    [sites] = re.findall(r": (\d+) sites, \d+ runs \(require counts", total)
    assert "of them; it keeps" in total
    jax.jit(overlap(f, require=int(sites))).lower(*arguments)
    with pytest.raises(ValueError, match=f"only {sites} of"):
        jax.jit(overlap(f, require=int(sites) + 1)).lower(*arguments)


def test_what_a_loop_computes_again_counts_with_its_steps(make_mesh: MeshFactory) -> None:
    """The gather of the forward and that of the recomputation are of one place, in two lines."""

    @jax.checkpoint
    def layer(x: jax.Array, w: jax.Array) -> jax.Array:
        gathered = lax.all_gather(x, AXIS, tiled=True)
        return x + lax.psum_scatter(jnp.tanh(gathered @ w[0]) @ w[1], AXIS, tiled=True)

    def loss(ws: jax.Array, x: jax.Array) -> jax.Array:
        x, _ = lax.scan(lambda x, w: (layer(x, w), None), x, ws)
        return lax.psum(jnp.sum(x**2), AXIS)

    specs = P(None, None, None), P(AXIS)
    mapped = jax.shard_map(loss, mesh=make_mesh({AXIS: 2}), in_specs=specs, out_specs=P())
    arguments = jnp.ones((3, 2, 4, 4)), jnp.ones((4, 4))
    explanation = explain(jax.grad(mapped))(*arguments)
    ops = ("all_gather_matmul", "matmul_reduce_scatter")
    counts = [runs for line, runs in explanation.runs.items() if line.op in ops]
    assert counts == [3] * 5


@pytest.mark.needs("fused")
@pytest.mark.parametrize("fused", [False, True])
def test_overlap_would_use_fused_kernels_where_they_may_be(fused: bool) -> None:
    mesh = AbstractMesh((4,), (AXIS,), axis_types=(AxisType.Auto,), abstract_device=H200)

    def down(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.psum_scatter(x @ w, AXIS, tiled=True)

    sharded = jax.shard_map(
        down, mesh=mesh, in_specs=(P(None, AXIS), P(AXIS)), out_specs=P(AXIS), check_vma=False
    )
    shapes = [jax.ShapeDtypeStruct(shape, BFLOAT16) for shape in ((2048, 14336), (14336, 4096))]
    (site,) = explain(sharded, peer_kernels=fused)(*shapes).plain
    assert site.decision is not None
    assert site.decision.implementation == ("fused" if fused and HAS_KERNELS else "xla")


def test_what_overlap_has_done_with_a_plain_program(make_mesh: MeshFactory) -> None:
    overlapped = overlap(plain(make_mesh({AXIS: 2})), implementation="ring")
    for fun in (overlapped, jax.jit(overlapped), overlap(overlapped)):
        gather, scatter, psum = lines_of(fun, *flat_arguments(), verbose=True)
        shapes = "float32 [4,4]@[4,6] over tensor=2"
        assert gather[2:] == ["all_gather_matmul", shapes, "ring by overlap", "requested"]
        assert scatter[2] == "matmul_reduce_scatter" and scatter[4] == "ring by overlap"
        assert re.fullmatch(r".*explained\.py:\d+ in plain_block", gather[1])
        assert psum[2:5:2] == ["psum", "left alone"]


@pytest.mark.needs("fused")
def test_overlap_falls_back_within_a_sequence(make_mesh: MeshFactory) -> None:
    sharded = plain(make_mesh({AXIS: 2}))
    fun = overlap(sharded, implementation=("fused", "ring"), require=2)
    gather, scatter = lines_of(fun, *flat_arguments())
    reason = "fused is not possible: these kernels run on Hopper GPUs only"
    for line in (gather, scatter):
        assert line[4:] == ["ring by overlap", f"fallback: {reason}; requested"]


@pytest.mark.needs("fused")
def test_overlap_leaves_alone_what_the_backend_cannot_execute(make_mesh: MeshFactory) -> None:
    sharded = plain(make_mesh({AXIS: 2}))
    (site, *_) = find_sites(sharded, implementation="fused")(*flat_arguments())
    assert site.decision is None
    assert site.reason == "fused is not possible: these kernels run on Hopper GPUs only"


def test_every_equal_site_that_overlap_replaced_counts(make_mesh: MeshFactory) -> None:
    """Although it traces their ops once."""

    def body(x, up):
        return [lax.all_gather(scale * x, AXIS, tiled=True) @ up for scale in (1, 2, 3)]

    sharded = jax.shard_map(
        body,
        mesh=make_mesh({AXIS: 2}),
        in_specs=(P(AXIS), P(None, AXIS)),
        out_specs=[P(None, AXIS)] * 3,
    )
    x, up, _ = flat_arguments()
    explanation = explain(overlap(sharded))(x, up)
    assert [decision.site.replaces for decision in explanation.decisions] == ["all_gather"] * 3
    assert explanation.table(WIDE).splitlines()[1].startswith("3×")


def test_gradients_of_what_overlap_replaced_are_ops_at_its_line(make_mesh: MeshFactory) -> None:
    overlapped = overlap(plain(make_mesh({AXIS: 2})), implementation="ring")

    def loss(*args):
        return overlapped(*args)[0].sum()

    explanation = explain(jax.grad(loss, (0, 1, 2)))(*flat_arguments())
    forward, backward = explanation.decisions[:2], explanation.decisions[2:]
    assert [decision.site.direction for decision in backward] == ["backward"] * 2
    assert [d.site.source for d in backward] == [d.site.source for d in forward[::-1]]
    assert not any(site.replaced for site in explanation.plain)


def test_a_batched_matmul_that_overlap_replaced_is_at_its_line(make_mesh: MeshFactory) -> None:
    """Once in each pass, although its gradient carries out the forward again."""

    def body(x, experts):
        return jnp.einsum("esd,edf->esf", lax.all_gather(x, AXIS, axis=1, tiled=True), experts)

    sharded = jax.shard_map(
        body,
        mesh=make_mesh({AXIS: 2}),
        in_specs=(P(None, AXIS), P(None, None, AXIS)),
        out_specs=P(None, None, AXIS),
    )
    shapes = [jax.ShapeDtypeStruct(shape, np.float32) for shape in ((3, 4, 6), (3, 6, 8))]
    gradients = jax.grad(lambda *args: overlap(sharded)(*args).sum(), (0, 1))
    decisions = explain(gradients)(*shapes).decisions
    assert [decision.site.direction for decision in decisions] == ["forward", "backward"]
    for decision in decisions:
        assert decision.site.replaces == "all_gather"
        assert decision.site.source is not None
        assert decision.site.source.function.endswith("body")


def test_predicted_gain_of_what_is_not_replaced() -> None:
    mesh = AbstractMesh((4,), (AXIS,), axis_types=(AxisType.Auto,), abstract_device=H200)
    shapes = flat_arguments(8192, 8192, 28672, dtype=BFLOAT16)
    explanation = explain(plain(mesh))(*shapes)
    site = explanation.plain[0]
    assert site.decision is not None and site.decision.seconds and site.decision.reference_seconds
    seconds, reference = site.decision.seconds, site.decision.reference_seconds
    assert seconds < reference
    line = re.split(r"  +", explanation.table(WIDE).splitlines()[1])
    assert line[5:8] == [
        f"{seconds * 1e6:.0f}",
        f"{reference * 1e6:.0f}",
        f"{(reference - seconds) * 1e6:.0f} µs ({reference / seconds:.2f}×)",
    ]
    assert line[4] == f"{site.decision.implementation}, with overlap"


def test_what_overlap_requires_and_does_not_find_is_explained_in_its_error(
    make_mesh: MeshFactory,
) -> None:
    fun, shapes = plain(make_mesh({AXIS: 2})), flat_arguments()
    with pytest.raises(ValueError, match="require=3: only 2") as error:
        overlap(fun, require=3)(*(np.zeros(shape.shape, shape.dtype) for shape in shapes))
    sentence, _, table = str(error.value).partition("\n\n")
    assert sentence.endswith(
        "only 2 of 3 gathers and sums over devices were replaced; require 2, or"
        " change what is left alone:"
    )
    assert len(f"ValueError: {sentence}") <= 120
    # The lines of explain for what it left alone; sites are no answer, and many in a large model.
    explained = replace(explain(overlap(fun), verbose=True)(*shapes), decisions=())
    *lines, _ = explained.table().splitlines()
    assert table.splitlines() == lines
    assert "psum" in table and "gather_matmul" not in table


@pytest.mark.needs("fused")
def test_what_overlap_left_alone_is_not_replaced_by_explain(make_mesh: MeshFactory) -> None:
    """On CPUs a fused kernel cannot run, and no other backend was allowed."""
    fun = overlap(plain(make_mesh({AXIS: 2})), implementation="fused")
    table = explain(fun, verbose=True)(*flat_arguments()).table(WIDE)
    assert "with overlap" not in table and "pass the function" not in table
    assert table.count("fused is not possible") == 2
    assert "3 plain gathers and sums: 3 left alone" in table


SLICED = {
    "rows": lambda x, w: lax.all_gather(x, AXIS, tiled=True)[:4] @ w,
    "features": lambda x, w: lax.all_gather(x, AXIS, tiled=True)[:, :2] @ w[:2],
    "dynamic rows": lambda x, w: (
        lax.dynamic_slice_in_dim(lax.all_gather(x, AXIS, tiled=True), x.shape[0] - 1, 4) @ w
    ),
}
CURED = {
    "rows": lambda x, w: (lax.all_gather(x, AXIS, tiled=True) @ w)[:4],
    "features": lambda x, w: lax.all_gather(x[:, :2], AXIS, tiled=True) @ w[:2],
    "dynamic rows": lambda x, w: lax.dynamic_slice_in_dim(
        lax.all_gather(x, AXIS, tiled=True) @ w, x.shape[0] - 1, 4
    ),
}
SLICED_SUMS = {
    "rows": lambda x, w: lax.psum((x @ w)[:4], AXIS),
    "scattered rows": lambda x, w: lax.psum_scatter((x @ w)[:4], AXIS, tiled=True),
    "parts": lambda x, w: sum(lax.psum(part, AXIS) for part in jnp.split(x @ w, 2)),
}
CURED_SUMS = {
    "rows": lambda x, w: lax.psum(x @ w, AXIS)[:4],
    "scattered rows": lambda x, w: lax.psum_scatter(x[:4] @ w, AXIS, tiled=True),
    "parts": lambda x, w: sum(jnp.split(lax.psum(x @ w, AXIS), 2)),
}


@pytest.mark.parametrize("case", SLICED)
def test_a_slice_after_a_gather_has_a_cure_which_helps(make_mesh: MeshFactory, case: str) -> None:
    """And the result is the same."""
    x, w = jnp.arange(32.0).reshape(8, 4), jnp.ones((4, 6))
    cure = "which could cut x before the gather or the product after the matmul, uses the gathered"
    results = []
    for body, replaced in ((SLICED[case], False), (CURED[case], True)):
        fun = jax.shard_map(
            body,
            mesh=make_mesh({AXIS: 2}),
            in_specs=(P(AXIS), P()),
            out_specs=P(),
            check_vma=False,
        )
        (site,) = explain(fun)(x, w).plain
        assert site.replaced == replaced
        assert (cure in site.reason) != replaced
        results.append(np.asarray(overlap(fun)(x, w)))
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize("case", SLICED_SUMS)
def test_a_slice_before_a_sum_has_a_cure_which_helps(make_mesh: MeshFactory, case: str) -> None:
    x, w = jnp.arange(32.0).reshape(8, 4), jnp.ones((4, 6))
    results = []
    for body, replaced in ((SLICED_SUMS[case], False), (CURED_SUMS[case], True)):
        fun = jax.shard_map(
            body,
            mesh=make_mesh({AXIS: 2}),
            in_specs=(P(None, AXIS), P(AXIS)),
            out_specs=P(AXIS) if case == "scattered rows" else P(),
            check_vma=False,
        )
        for site in explain(fun)(x, w).plain:
            assert site.replaced == replaced
            cure = site.reason.endswith("; cut x or w before the matmul, or the sum after it")
            assert cure != replaced
        results.append(np.asarray(overlap(fun)(x, w)))
    np.testing.assert_array_equal(*results)


def summed_products(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    return lax.psum(jnp.sin(x @ up) @ down, AXIS)


def over_data(body: Callable, make_mesh: MeshFactory) -> Callable:
    """A loss whose gradients of weights are sums over a second axis."""
    sharded = jax.shard_map(
        body,
        mesh=make_mesh({"data": 2, AXIS: 2}),
        in_specs=(P("data"), P(None, AXIS), P(AXIS)),
        out_specs=P("data"),
    )
    return lambda *args: sharded(*args).sum()


def test_sums_of_gradients_beside_an_op_have_a_cure_which_helps(make_mesh: MeshFactory) -> None:
    """The sites of one `overlap` around the gradient are more than those of one inside."""
    loss, arguments = over_data(summed_products, make_mesh), flat_arguments()
    inside = explain(jax.grad(overlap(loss), (1, 2)))(*arguments).plain
    reasons = [site.reason for site in inside if not site.replaced]
    assert reasons and all(
        re.fullmatch(
            r"the summed array comes from the op that overlap has already put in place of the"
            r" matmul at test_explain_overlap\.py:\d+; to have it look at this sum too, put it"
            r" around the gradient: overlap\(jax\.grad\(f\)\), not jax\.grad\(overlap\(f\)\)",
            reason,
        )
        for reason in reasons
    )
    around = explain(overlap(jax.grad(loss, (1, 2))))(*arguments).plain
    assert all(site.replaced for site in around)


def test_a_sum_of_the_result_of_an_op_that_the_program_calls(make_mesh: MeshFactory) -> None:
    """No `overlap` has put the op there, and elsewhere it would not have found more."""

    def body(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.psum(matmul_all_reduce(x, w, AXIS), "data")

    mesh, specs = make_mesh({"data": 2, AXIS: 2}), (P("data", AXIS), P(AXIS))
    sums = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P())
    (site,) = explain(sums)(*flat_arguments()[:2]).plain
    expected = (
        r"the summed array comes from an op at .*py:\d+, whose results overlap leaves as they.*"
    )
    assert re.fullmatch(expected, site.reason)
