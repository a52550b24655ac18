"""Every form of the chunk matmul lowers for CUDA, on machines without GPUs too.

With the kernel, a ring consists of launches and permutes. Nothing else multiplies, copies or adds
chunks.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import pytest
from jax import ShapeDtypeStruct
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from collective_matmul import all_gather_matmul, matmul_reduce_scatter
from collective_matmul.mosaic_gpu import device
from collective_matmul.mosaic_gpu.hopper_matmul import chunk_matmul, tiling
from collective_matmul.mosaic_gpu.hopper_matmul.chunk_matmul import Rows, shared_launch
from collective_matmul.mosaic_gpu.hopper_matmul.tile_scheduler import BLOCK_AXES
from collective_matmul.mosaic_gpu.hopper_matmul.tiling import MatmulProblem, Tiling
from collective_matmul.operands.format import FORMATS
from collective_matmul.operands.scaled import scaled_chunks
from collective_matmul.schedule.schedules import Use, make_schedule
from tests.conftest import MeshFactory
from tests.covering import covering
from tests.hopper import MULTIPROCESSORS
from tests.ops.matmul.ring.test_program_structure import RINGS, equations
from tests.reference import AXIS, OPS, Case

pytestmark = pytest.mark.usefixtures("_for_hopper")

DEVICES = 3

every_op = pytest.mark.parametrize("op", OPS)
every_ring = pytest.mark.parametrize("ring", RINGS)


@pytest.fixture
def mesh(make_mesh: MeshFactory) -> Mesh:
    return make_mesh({AXIS: DEVICES})


def lowered(fun: Callable, *arguments: Any) -> str:
    return jax.jit(fun).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


def case_of(op: str, ring: str, devices: int = DEVICES) -> Case:
    """Returns a case in which all global arrays are square."""
    size = 64 * devices
    return Case(op, ring, devices, (size,), size, ((size,),), dtype="bfloat16")


def shapes(case: Case) -> tuple[Any, Any, Any]:
    """Returns the shapes of the arrays that `Case.arrays` draws."""

    def shape(*sizes: int) -> ShapeDtypeStruct:
        return ShapeDtypeStruct(sizes, case.dtype)

    x = shape(*case.leading, case.contracted)
    ws = tuple(shape(case.contracted, *columns) for columns in case.columns)
    return x, ws, tuple(shape(*case.leading, *columns) for columns in case.columns)


def forward_and_backward(case: Case, mesh: Mesh) -> str:
    """Returns the program that `Case.run` would compile."""

    def lower(fun: Callable) -> Callable:
        return functools.partial(lowered, fun)

    return str(case.run(mesh, shapes(case), jit=lower))


def multiplies(use: Use, ring: str) -> int:
    return sum(
        len(step.multiply) for step in make_schedule(use, RINGS[ring].pattern, DEVICES).steps
    )


def launches(op: str, ring: str) -> int:
    """Returns the expected launches: one for each chunk, and one for the weight gradients."""
    if op == "matmul_all_reduce":
        return multiplies("scatter", ring)
    return multiplies("gather", ring) + multiplies("scatter", ring) + 1


def kernels(text: str) -> list[str]:
    """Returns the kernels in a program. All launches of a kernel call one function."""
    return [line for line in text.splitlines() if "stablehlo.custom_call @mosaic_gpu" in line]


def calls(text: str) -> int:
    return len(re.findall(r"call @launch", text))


def count(text: str, name: str) -> int:
    return len(re.findall(rf"stablehlo\.{name}\b", text))


def assert_nothing_but_kernels(text: str, op: str, ring: str) -> None:
    """Asserts that kernels do all the work. A chunk of a larger array overwrites an operand."""
    assert calls(text) == launches(op, ring)
    # The backward of an all-reduce has nothing to hide, and is left to XLA.
    assert count(text, "dot_general") == (2 if op == "matmul_all_reduce" else 0)
    assert count(text, "dynamic_slice") == count(text, "dynamic_update_slice") == 0
    in_place = [results_in_place(kernel) for kernel in kernels(text)]
    # Gathers write chunks; scatters, which all-reduces begin with, and weight gradients do not.
    assert any(in_place) == (op != "matmul_all_reduce")


def results_in_place(kernel: str) -> bool:
    """Whether every result of a kernel overwrites an operand; otherwise none does."""
    results = kernel.rpartition("->")[2].count("tensor<")
    overwritten = kernel.count("#stablehlo.output_operand_alias<")
    assert overwritten in (0, results)
    return overwritten > 0


@every_op
@every_ring
def test_ring(op: str, ring: str, mesh: Mesh) -> None:
    assert_nothing_but_kernels(forward_and_backward(case_of(op, ring), mesh), op, ring)


def quick_for(op: str, ring: str) -> bool:
    """Whether more dimensions are tried with a ring by default; `test_ring` has all rings."""
    return ring == "ring" or (op, ring) == ("all_gather_matmul", "ring_two_way")


@pytest.mark.parametrize(
    ("op", "ring"),
    [
        pytest.param(op, ring, marks=() if quick_for(op, ring) else pytest.mark.exhaustive)
        for op in OPS
        for ring in RINGS
    ],
)
def test_ring_with_more_dimensions_and_weights(op: str, ring: str, mesh: Mesh) -> None:
    """Before the chunks' dimension and after it; several weights; untracked axes; float16."""
    columns = (96 * DEVICES,), (DEVICES, 32)
    case = replace(
        case_of(op, ring),
        leading=(3, 16 * DEVICES, 2),
        columns=columns if op == "all_gather_matmul" else columns[:1],
        dimension=1,
        dtype="float16",
        check_vma=False,
    )
    assert_nothing_but_kernels(forward_and_backward(case, mesh), op, ring)


@every_op
@pytest.mark.parametrize("in_axes", [(0, None), (None, 0)], ids=str)
def test_vmap(op: str, in_axes: tuple[int | None, int | None], mesh: Mesh) -> None:
    case = case_of(op, "ring")
    x_spec, (w_spec,), (y_spec,) = case.specs
    x, (w,), (dy,) = shapes(case)

    def batched_spec(spec: P, axis: int | None = 0) -> P:
        return spec if axis is None else P(None, *spec)

    def batched(array: ShapeDtypeStruct, axis: int | None = 0) -> ShapeDtypeStruct:
        return array if axis is None else ShapeDtypeStruct((5, *array.shape), array.dtype)

    sharded = jax.shard_map(
        jax.vmap(lambda x, w: case.call(x, (w,))[0], in_axes),
        mesh=mesh,
        in_specs=(batched_spec(x_spec, in_axes[0]), batched_spec(w_spec, in_axes[1])),
        out_specs=batched_spec(y_spec),
    )

    def result_and_gradients(x: jax.Array, w: jax.Array, dy: jax.Array) -> Any:
        y, transpose = jax.vjp(sharded, x, w)
        return y, transpose(dy)

    operands = map(batched, (x, w), in_axes)
    assert kernels(lowered(result_and_gradients, *operands, batched(dy)))


@pytest.mark.parametrize("fp8", [None, "rowwise"])
@pytest.mark.parametrize("chunks", [1, 2])
def test_only_chunks_of_larger_results_overwrite_an_operand(fp8: Any, chunks: int) -> None:
    """XLA may allocate an empty array to overwrite long before its kernel, for all layers.

    A barrier keeps what other kernels wrote: else XLA fuses the last kernel of a result that a scan
    stacks with the copy into the stack, and the rows of that kernel alone arrive there.
    """
    x = ShapeDtypeStruct((128, 128), jnp.bfloat16)

    def multiply(x: jax.Array, w: jax.Array) -> Any:
        results = [Rows(jax.lax.empty((chunks * 128, 128), x.dtype), 0, 128)]
        if fp8 is None:
            return chunk_matmul.multiply_chunks(
                [Rows(x, 0, 128)], [[w]], results, dimension=0, transpose_w=False
            )
        (rows,), terms = FORMATS[fp8].rows([x]), [FORMATS[fp8].matrices([w])]
        return scaled_chunks.multiply_chunks([Rows(rows, 0, 128)], terms, results, dimension=0)

    program = lowered(multiply, x, x)
    (kernel,) = kernels(program)
    assert results_in_place(kernel) == (chunks > 1)
    assert program.count("optimization_barrier") == (chunks > 1)


def layers(number: int, mesh: Mesh) -> str:
    """A stack of feed-forward layers, with gradients."""

    def stack(x: jax.Array, weights: list[tuple[jax.Array, ...]]) -> jax.Array:
        for up, gate, down in weights:
            u, g = all_gather_matmul(x, (up, gate), AXIS, implementation="ring")
            x += matmul_reduce_scatter(jax.nn.silu(g) * u, down, AXIS, implementation="ring")
        return x

    weight_specs = [(P(None, AXIS), P(None, AXIS), P(AXIS))] * number
    sharded = jax.shard_map(stack, mesh=mesh, in_specs=(P(AXIS), weight_specs), out_specs=P(AXIS))

    def loss(x: jax.Array, weights: Any) -> jax.Array:
        return jnp.sum(sharded(x, weights).astype(jnp.float32))

    rows, width, hidden = 64 * DEVICES, 64, 64 * DEVICES
    x, up, down = (
        ShapeDtypeStruct(shape, jnp.bfloat16)
        for shape in ((rows, width), (width, hidden), (hidden, width))
    )
    return lowered(jax.value_and_grad(loss, (0, 1)), x, [(up, up, down)] * number)


def test_layers_share_their_kernels(mesh: Mesh) -> None:
    """A kernel takes long to compile."""
    one, three = layers(1, mesh), layers(3, mesh)
    assert calls(three) == 3 * calls(one)
    assert len(kernels(three)) == len(kernels(one))


@pytest.mark.parametrize(
    "change",
    [{"dtype": "float32"}, {"contracted": 36}, {"columns": ((24,),)}, {"leading": (20,)}],
    ids=str,
)
def test_what_the_kernel_cannot_do_is_left_to_xla(
    change: dict[str, Any], make_mesh: MeshFactory
) -> None:
    case = replace(case_of("all_gather_matmul", "ring", 2), **change)
    text = forward_and_backward(case, make_mesh({AXIS: 2}))
    assert not kernels(text)
    # Each chunk of both passes, and the weight's gradient.
    assert count(text, "dot_general") == 2 + 2 + 1


def test_no_kernels_over_automatic_mesh_axes(make_mesh: MeshFactory) -> None:
    """The compiler cannot shard a kernel, and would gather its operands."""
    case = case_of("all_gather_matmul", "ring", 2)
    x, ws, _ = shapes(case)
    x_spec, w_specs, y_specs = case.specs
    sharded = jax.shard_map(
        case.call,
        mesh=make_mesh({"data": 2, AXIS: 2}),
        in_specs=(x_spec, w_specs),
        out_specs=y_specs,
        axis_names={AXIS},
    )
    assert not kernels(lowered(sharded, x, ws))


def test_other_machines_get_no_kernels(monkeypatch: pytest.MonkeyPatch, mesh: Mesh) -> None:
    monkeypatch.setattr(device, "target", lambda: None)
    for ring in RINGS:
        assert not kernels(forward_and_backward(case_of("all_gather_matmul", ring), mesh))


def tuned_forms() -> list[tuple[MatmulProblem, Tiling]]:
    """Returns all measured tilings, with a problem of the orientation it was measured for.

    Tilings that differ in the order of tiles only are returned once. Problems have one term and one
    result: a kernel with more repeats the same for each of them.
    """
    forms = {}
    for problem, (found, *_) in tiling.measured_tilings().items():
        form = replace(problem, k=problem.k[:1], n=problem.n[:1])
        key = (
            replace(found, grid_minor_dim="m", grid_tile_width=8),
            form.x_contracted_axis,
            form.w_contracted_axis,
        )
        forms.setdefault(key, (form, found))
    return list(forms.values())


# Clusters of four blocks, which are not the best of any problem in the table.
FOUR_BLOCK_CLUSTERS = [
    (MatmulProblem(1, 512, (512,), (512,)), Tiling(cluster_dimension="mn")),
    (
        MatmulProblem(1, 512, (512,), (512,), w_contracted_axis=2),
        Tiling(256, 128, epilogue_stages=1, cluster_dimension="mn"),
    ),
    (
        MatmulProblem(1, 512, (512,), (512,), x_contracted_axis=1),
        Tiling(128, 224, swizzle=64, cluster_dimension="mn"),
    ),
]


def launch_of(problem: MatmulProblem, tiling_: Tiling) -> tuple[Callable, tuple]:
    """Returns a launch of one term and one result, and the shapes of its arguments."""
    (contracted,), (columns,) = problem.k, problem.n

    def planes(*shape: int) -> ShapeDtypeStruct:
        return ShapeDtypeStruct((1, *shape), jnp.bfloat16)

    x, w, out = (contracted, problem.m), (contracted, columns), planes(problem.m, columns)
    arguments = (
        [planes(*(x if problem.x_contracted_axis == 1 else x[::-1]))],
        [[planes(*(w if problem.w_contracted_axis == 1 else w[::-1]))]],
        [out],
        ([0] * 3, [0] * 3),
    )
    target = device.Target(MULTIPROCESSORS)
    return shared_launch(problem, tiling_, ((0, 0, 1), (0, 0, 1), 1), target), arguments


def factors(form: tuple[MatmulProblem, Tiling]) -> dict[str, Any]:
    """Facts that decide which code a kernel has."""
    problem, tiling_ = form
    axes = {"x": problem.x_contracted_axis, "w": problem.w_contracted_axis}
    order = {"grid_minor_dim": None, "grid_tile_width": None}
    return dataclasses.asdict(tiling_) | axes | order


TILED_FORMS = [*tuned_forms(), *FOUR_BLOCK_CLUSTERS]
QUICK_FORMS = covering(TILED_FORMS, factors)


@pytest.mark.parametrize(
    "form",
    [
        pytest.param(
            form, id=str(form), marks=() if form in QUICK_FORMS else pytest.mark.exhaustive
        )
        for form in TILED_FORMS
    ],
)
def test_every_measured_tiling_lowers(form: tuple[MatmulProblem, Tiling]) -> None:
    problem, tiling_ = form
    assert problem.can_swizzle(tiling_)
    launch, arguments = launch_of(problem, tiling_)
    assert len(kernels(lowered(launch, *arguments))) == 1


@pytest.mark.parametrize(
    ("cluster_dimension", "x_axis", "w_axis"),
    [(None, None, None), ("m", None, 0), ("n", 1, None), ("mn", 1, 0)],
)
def test_blocks_of_a_cluster_multicast(
    cluster_dimension: Literal["m", "n", "mn"] | None, x_axis: int | None, w_axis: int | None
) -> None:
    """Blocks along m multicast w, blocks along n multicast x.

    The interpreter does not show that: there each block copies all that it needs.
    """
    launch, arguments = launch_of(
        MatmulProblem(1, 256, (64,), (512,)), Tiling(cluster_dimension=cluster_dimension)
    )
    found: list[Any] = list(equations(jax.make_jaxpr(launch)(*arguments).jaxpr))
    copies = [
        (equation.invars[0].aval.shape, equation.params["collective_axes"])
        for equation in found
        if equation.primitive.name == "copy_gmem_to_smem"
    ]
    axes = [None if axis is None else (BLOCK_AXES[axis],) for axis in (x_axis, w_axis)]
    assert copies == list(zip([(1, 256, 64), (1, 64, 512)], axes, strict=True))
