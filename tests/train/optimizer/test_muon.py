"""Muon: it equals optax's on whole arrays on every mesh, and the devices share its work."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend.core import Literal, jaxprs_in_params
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers

from tests.covering import covering
from train.checkpoint.new_state import init_state
from train.config import presets
from train.config.config import MeshSizes, OptimizerConfig
from train.optimizer.muon import matrix_dimensions, to_shards, to_whole
from train.optimizer.optimizer import make_optimizer
from train.optimizer.schedule import make_schedule
from train.optimizer.state import abstract_state, state_specs
from train.parallel.mesh import make_abstract_mesh, make_mesh
from train.parallel.model import ModelFunctions, Params
from train.step import sharded_step

#: The learning rate is not constant, nor 0 at first. The iterations are float32.
OPTIMIZER = OptimizerConfig(
    kind="muon", learning_rate=0.1, warmup_steps=0, weight_decay=0.5, b1=0.8,
    muon_momentum=0.7, muon_dtype="float32",
)  # fmt: skip
LAYERS = 3
#: 3 of its matrices travel together: two devices have several batches of them, and of eight some
#: have none. Heads, width and vocabulary suit every mesh.
TINY = dataclasses.replace(
    presets.debug(),
    model=dataclasses.replace(
        presets.debug().model, num_layers=LAYERS, features=16, hidden_features=24, num_heads=8,
        num_key_value_heads=8, head_dim=4, vocabulary_size=32,
    ),
    optimizer=OPTIMIZER,
    steps=4,
)  # fmt: skip
#: One for each way in which a parameter is treated, and for each shape and sharding.
COMPARED = re.compile("embedding|norm|output|query|up")


def random_arrays(*, stack: bool) -> list[Any]:
    """Parameters, and the gradients of each step."""
    shapes = {n: leaf.shape for n, leaf in compared_model(MeshSizes()).abstract_params.items()}
    generator = np.random.default_rng(0)
    arrays = [
        {name: generator.normal(size=shape).astype("f") for name, shape in shapes.items()}
        for _ in range(TINY.steps)
    ]
    return list(map(stacked, arrays)) if stack else arrays


def compared_model(
    sizes: MeshSizes, zero: Any = 0, *, layers: int = LAYERS, stack: bool = False
) -> ModelFunctions:
    """A model of which only some parameters are left; with `stack`, all layers' in one array."""
    shape = dataclasses.replace(TINY.model, num_layers=layers)
    model = ModelFunctions(dataclasses.replace(TINY, model=shape, zero=zero), sizes)
    kept = [name for name in model.abstract_params if COMPARED.search(name)]
    model.abstract_params = {name: model.abstract_params[name] for name in kept}
    model.specs, model.kept_weights = {name: model.specs[name] for name in kept}, {}
    if stack:
        names = {name: re.sub(r"\.\d+\.", ".", name) for name in kept}
        model.abstract_params = jax.eval_shape(stacked, model.abstract_params)
        model.specs = {
            new: model.specs[old] if new == old else P(None, *model.specs[old])
            for old, new in names.items()
        }
    return model


def stacked(params: Any) -> Any:
    """The parameters of all layers as one array each, of which dimension 0 is the layer."""
    groups: dict[str, list[Any]] = {}
    for name, leaf in params.items():
        groups.setdefault(re.sub(r"\.\d+\.", ".", name), []).append(leaf)
    # A name that has no number is not that of a layer, or its layers are stacked.
    stack = jnp.stack if isinstance(next(iter(params.values())), jax.Array) else np.stack
    return {
        name: stack(leaves) if name not in params else leaves[0] for name, leaves in groups.items()
    }


def distributed_steps(
    model: ModelFunctions, sizes: MeshSizes, config: OptimizerConfig, arrays: list[Any]
) -> Params:
    """Parameters after steps with the gradients that follow them in `arrays`."""
    optimizer = make_optimizer(config, TINY.steps, model.specs)
    specs = state_specs(model, optimizer)

    def step(state: Any, gradients: Params) -> Any:
        updates, opt_state = optimizer.update(gradients, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt_state": opt_state, "step": state["step"] + 1}

    mesh = make_mesh(sizes)
    step = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(specs, model.specs), out_specs=specs))
    params, *gradients = arrays
    state = init_state(model, optimizer, mesh, params)
    for gradient in gradients:
        state = step(state, gradient)
    return jax.device_get(state["params"])


#: The matrices of the layers, stacked, as optax calls their dimensions.
NUMBERS = {
    "layers.attention.output.kernel": MuonDimensionNumbers((1, 2), 3),
    "layers.attention.projection.query.kernel": MuonDimensionNumbers(1, (2, 3)),
    "layers.feed_forward.up.kernel": MuonDimensionNumbers(1, 2),
}


@functools.cache
def whole_steps(config: OptimizerConfig) -> dict[str, np.ndarray]:
    """Parameters after steps of `optax.contrib.muon` without a mesh, on stacked parameters."""

    def numbers(tree: Any) -> Any:
        return {
            name: leaf if isinstance(leaf, optax.MaskedNode) else NUMBERS.get(name)
            for name, leaf in tree.items()
        }

    def muon(adam_weight_decay: float) -> optax.GradientTransformation:
        return optax.contrib.muon(
            make_schedule(config, TINY.steps),
            beta=config.muon_momentum,
            weight_decay=config.weight_decay,
            adam_b1=config.b1,
            adam_b2=config.b2,
            adam_weight_decay=adam_weight_decay,
            muon_weight_dimension_numbers=numbers,
            consistent_rms=config.muon_update_rms,
        )

    params, *gradients = random_arrays(stack=True)
    # Optax decays norms as it decays the embedding.
    optimizer = optax.partition(
        {"norm": muon(0), "other": muon(config.weight_decay)},
        {name: "norm" if "norm" in name else "other" for name in params},
    )

    @jax.jit
    def step(params, opt_state, gradient):
        updates, opt_state = optimizer.update(gradient, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    opt_state = jax.jit(optimizer.init)(params)
    for gradient in gradients:
        params, opt_state = step(params, opt_state, gradient)
    return jax.device_get(params)


MESHES = [(1, 1, 1), (1, 1, 8), (1, 8, 1), (2, 2, 2), (1, 4, 2)]
PRODUCT = [
    (sizes, zero, stack)
    for sizes in MESHES
    for zero in ((0, 1, 2, 3) if sizes[1] > 1 else (0,))
    for stack in (False, True)
]
FACTORS = ("sizes", "zero", "stack")
COVERING = covering(PRODUCT, lambda case: dict(zip(FACTORS, case, strict=True)))
#: Replicas and two axes that shard; stacked layers.
QUICK = [((2, 2, 2), 1, False), ((1, 4, 2), 3, True)]
CASES = [*QUICK, *(case for case in COVERING if case not in QUICK)]


@pytest.mark.parametrize(
    ("sizes", "zero", "stack"),
    [pytest.param(*case, marks=() if case in QUICK else pytest.mark.exhaustive) for case in CASES],
    ids=str,
)
def test_it_equals_optax_on_every_mesh(sizes, zero, stack):
    sizes = MeshSizes(*sizes)
    model = compared_model(sizes, zero, stack=stack)
    found = distributed_steps(model, sizes, OPTIMIZER, random_arrays(stack=stack))
    for name, leaf in whole_steps(OPTIMIZER).items():
        # The iterations multiply small singular values by 3.4 five times, and so their rounding.
        # Updates have a root mean square of 0.02.
        np.testing.assert_allclose(stacked(found)[name], leaf, atol=1e-5, err_msg=name)


#: Experts over tensor, of which fsdp shards each or has replicas; over fsdp; over both. Stacked.
EXPERTS = {
    "layers.0.experts.w_gate": P("tensor", "fsdp", None),
    "layers.0.experts.w_up": P("tensor", None, None),
    "layers.1.experts.w_up": P("fsdp", None, "tensor"),
    "layers.experts.w_up": P(None, ("fsdp", "tensor"), None, None),
}


def test_experts_are_matrices_wherever_they_are():
    generator = np.random.default_rng(0)
    sizes = {name: (3, 4, 8, 6)[4 - len(spec) :] for name, spec in EXPERTS.items()}
    arrays = {name: generator.normal(size=size).astype("f") for name, size in sizes.items()}
    optimizer = make_optimizer(OPTIMIZER, TINY.steps, EXPERTS)

    def update(gradients: Params) -> Any:
        return optimizer.update(gradients, optimizer.init(gradients), gradients)[0]

    mesh = make_mesh(MeshSizes(data=2, fsdp=2, tensor=2))
    sharded = jax.shard_map(update, mesh=mesh, in_specs=(EXPERTS,), out_specs=EXPERTS)
    found = jax.jit(sharded)(arrays)
    one = optax.contrib.muon(
        make_schedule(OPTIMIZER, TINY.steps),
        beta=OPTIMIZER.muon_momentum,
        weight_decay=OPTIMIZER.weight_decay,
        consistent_rms=OPTIMIZER.muon_update_rms,
    )
    updated = jax.jit(lambda matrix: one.update(matrix, one.init(matrix), matrix)[0])
    for name, array in arrays.items():
        matrices = [updated(matrix) for matrix in array.reshape(-1, 8, 6)]
        expected = np.reshape(matrices, array.shape)
        np.testing.assert_allclose(found[name], expected, atol=1e-5, err_msg=name)
    assert matrix_dimensions("layers.0.experts.router.kernel") is None


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [
        # bfloat16 has 8 bits, and there are 15 matmuls. Updates add up to 0.06.
        ("bfloat16", 3e-3),
        pytest.param("float32", 1e-5, marks=pytest.mark.exhaustive),
    ],
)
def test_half_precision_and_several_batches(dtype, tolerance):
    """On replicas alone. The scale of the updates is the one that optax has by default."""
    sizes = MeshSizes(fsdp=2)
    options = {"muon_update_rms": None, "learning_rate": 0.02}
    config = dataclasses.replace(OPTIMIZER, muon_dtype=dtype, **options)
    found = distributed_steps(compared_model(sizes), sizes, config, random_arrays(stack=False))
    expected = whole_steps(dataclasses.replace(OPTIMIZER, **options))
    for name, leaf in expected.items():
        difference = np.abs(stacked(found)[name] - leaf).mean()
        assert difference < tolerance, name
        assert difference > 1e-5 or dtype == "float32" or name not in NUMBERS, name


def test_matrices_are_put_together_in_order():
    """Whichever dimensions two axes shard, beside an axis of replicas."""
    shardings = [
        (("fsdp",), ("tensor",)),
        (("tensor",), (), ("fsdp",)),
        (("tensor", "fsdp"), ()),
        ((), ("fsdp", "tensor")),
        ((), ("tensor",)),
        ((), ()),
    ]
    mesh = make_mesh(MeshSizes(2, 2, 2))

    def there_and_back(arrays):
        whole = [to_whole(x, s) for x, s in zip(arrays, shardings, strict=True)]
        return whole, [to_shards(x, s) for x, s in zip(whole, shardings, strict=True)]

    specs = [P(None, *(names or None for names in sharding)) for sharding in shardings]
    axes = [list(itertools.chain(*sharding)) for sharding in shardings]
    order = [P((*(n for n in mesh.axis_names if n not in used), *used)) for used in axes]
    arrays = [
        np.arange(16 * 4 ** len(sharding), dtype="f").reshape(16, *[4] * len(sharding))
        for sharding in shardings
    ]
    whole, shards = jax.jit(
        jax.shard_map(there_and_back, mesh=mesh, in_specs=(specs,), out_specs=(order, specs))
    )(arrays)
    for sharding, array, *found in zip(shardings, arrays, whole, shards, strict=True):
        for result in found:
            np.testing.assert_array_equal(result, array, err_msg=str(sharding))
        assert found[0].addressable_shards[0].data.shape == (2, *array.shape[1:])


def traced_update(sizes: MeshSizes, *, stack: bool) -> Any:
    """The jaxpr of an update of 16 layers in half precision, as each device runs it."""
    config = dataclasses.replace(OPTIMIZER, muon_dtype="bfloat16")
    model = compared_model(sizes, 1, layers=16, stack=stack)
    optimizer = make_optimizer(config, TINY.steps, model.specs)
    specs = state_specs(model, optimizer)["opt_state"]
    update = jax.shard_map(
        lambda grads, state: optimizer.update(grads, state, grads)[0],
        mesh=make_abstract_mesh(sizes),
        in_specs=(model.specs, specs),
        out_specs=model.specs,
    )
    state = abstract_state(model, optimizer)
    (sharded,) = jax.make_jaxpr(update)(state["params"], state["opt_state"]).eqns
    return sharded.params["jaxpr"]


def test_devices_share_the_work_and_shards_travel_in_half_precision():
    one, many = (traced_update(MeshSizes(*sizes), stack=True) for sizes in [(1, 1, 1), (2, 2, 2)])
    assert matmul_flops(one) == 8 * matmul_flops(many) > 0
    travelling = [equation.invars[0].aval.dtype for equation in equations(many) if moves(equation)]
    # Of 3 shapes, 2 batches each: there, and back, and to the other replica.
    assert travelling == ["bfloat16"] * 3 * 3 * 2


def test_a_batch_depends_on_its_own_matrices_alone():
    """So one can travel, there or back, while another one is orthogonalized or not yet there."""
    jaxpr = traced_update(MeshSizes(2, 2, 2), stack=False)
    behind = dependencies(jaxpr)
    matrices = {var for var in jaxpr.invars if var.aval.ndim > 1}
    multiplied = {e.outvars[0] for e in jaxpr.eqns if matmul_flops_of(e)}
    moved = {e.outvars[0] for e in jaxpr.eqns if moves(e)}
    arrivals = {var for var in moved if not behind[var] & multiplied}
    # Of 3 shapes, 2 batches of 8 matrices each, which are made of gradients and moments.
    assert len(arrivals) == 3 * 2
    assert all(len(behind[var] & matrices) == 2 * 8 for var in arrivals)
    assert all(len(behind[var] & arrivals) == 1 for var in moved | multiplied)
    names = compared_model(MeshSizes(), layers=16).abstract_params
    for name, update in zip(sorted(names), jaxpr.outvars, strict=True):
        assert len(behind[update] & arrivals) == (matrix_dimensions(name) is not None)


def test_without_clipping_it_begins_under_the_backward():
    def fewest_matmuls_before(clip_norm: float) -> int:
        optimizer = dataclasses.replace(OPTIMIZER, clip_norm=clip_norm)
        config = dataclasses.replace(TINY, optimizer=optimizer, zero=1, overlap="xla")
        sizes = MeshSizes(fsdp=2)
        model = ModelFunctions(config, sizes)
        transformation = make_optimizer(optimizer, config.steps, model.specs)
        step = sharded_step(config, model, transformation, make_abstract_mesh(sizes))
        tokens = jax.ShapeDtypeStruct((config.batch_size, config.sequence_length), "int32")
        batch = {"inputs": tokens, "targets": tokens}
        (sharded,) = jax.make_jaxpr(step)(abstract_state(model, transformation), batch).eqns
        jaxpr = sharded.params["jaxpr"]
        behind = dependencies(jaxpr)
        multiplied = {e.outvars[0] for e in jaxpr.eqns if matmul_flops_of(e)}
        moved = (e.outvars[0] for e in jaxpr.eqns if e.primitive.name == "all_to_all")
        return min(len(behind[var] & multiplied) for var in moved)

    # The norm of all gradients comes first where they are clipped.
    assert 0 < fewest_matmuls_before(math.inf) < fewest_matmuls_before(1.0)


def moves(equation: Any) -> bool:
    return equation.primitive.name in ("all_to_all", "all_gather_invariant")


def dependencies(jaxpr: Any, given: Sequence[Any] = ()) -> dict[Any, frozenset[Any]]:
    """For each variable, the arguments and the first results of equations that it depends on.

    Args:
      jaxpr: the equations.
      given: what the arguments depend on, by default on themselves.
    """
    behind = dict(zip(jaxpr.invars, given or [{var} for var in jaxpr.invars], strict=True))

    def among(found: dict[Any, Any], variables: Sequence[Any]) -> list[Any]:
        return [() if isinstance(var, Literal) else found.get(var, ()) for var in variables]

    for equation in jaxpr.eqns:
        own = frozenset([equation.outvars[0]])
        needed = among(behind, equation.invars)
        results = [frozenset().union(*needed)] * len(equation.outvars)
        if equation.primitive.name == "jit":  # XLA sees what is inside.
            inner = equation.params["jaxpr"].jaxpr
            results = among(dependencies(inner, needed), inner.outvars)
        behind.update(zip(equation.outvars, (own.union(r) for r in results), strict=True))
    return behind


def equations(jaxpr: Any) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from equations(inner)


def matmul_flops(jaxpr: Any) -> int:
    """Twice the multiplications of all matmuls."""
    return sum(map(matmul_flops_of, jaxpr.eqns))


def matmul_flops_of(equation: Any) -> int:
    """Twice the multiplications of one equation's matmuls, with those inside of it."""
    inside = sum(map(matmul_flops, jaxprs_in_params(equation.params)))
    inside *= equation.params.get("length", 1)  # Of a scan. That of the momentum alone is 0.
    if equation.primitive.name != "dot_general":
        return inside
    (contracted, _), _ = equation.params["dimension_numbers"]
    x = equation.invars[0].aval.shape
    result = equation.outvars[0].aval.shape
    return 2 * math.prod(result) * math.prod(x[dimension] for dimension in contracted)


def test_stacked_layers_that_are_sharded_are_refused():
    model = compared_model(MeshSizes(), stack=True)
    model.specs["layers.feed_forward.up.kernel"] = P("fsdp", None, "tensor")
    with pytest.raises(ValueError, match=r"is sharded by .* over the layers that are stacked"):
        distributed_steps(model, MeshSizes(fsdp=LAYERS), OPTIMIZER, random_arrays(stack=True))
