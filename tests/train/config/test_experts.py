"""Training models with experts: the same curve on every mesh, settings, memory, checkpoints."""

from __future__ import annotations

import dataclasses
import functools
import io
import itertools
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from jax.sharding import use_abstract_mesh
from rich.console import Console

from collective_matmul import record_decisions
from collective_matmul.jaxprs.dead_code import without_dead_code
from collective_matmul.jaxprs.walks import all_equations
from models import families
from tests.covering import covering
from tests.train.parallel.test_fp8 import step_of
from tests.train.reports import RECORD
from tests.train.test_step import SHORT, Trainer
from train.checkpoint.checkpoint import Checkpoints
from train.checkpoint.new_state import init_state
from train.config.checks import check
from train.config.config import ONE_DEVICE, Config, MeshConfig, MeshSizes
from train.config.experts import describe_experts, worst_case_bytes
from train.log.metrics import model_flops_per_token
from train.log.reporter import Reporter
from train.memory.step_memory import memory_of
from train.optimizer.optimizer import make_optimizer
from train.optimizer.state import state_on_mesh, trained_part
from train.parallel.mesh import make_abstract_mesh, make_mesh, mesh_sizes
from train.parallel.model import ModelFunctions, is_vector
from train.parallel.parameter_shards import replica_axes

MODEL = dataclasses.replace(
    SHORT.model, num_layers=2, features=32, hidden_features=48, num_heads=4, num_key_value_heads=4,
    head_dim=8, family="mixtral", num_experts=8, num_experts_per_token=2, router_loss_weight=0.05,
)  # fmt: skip
#: Biases and sinks beside the matrices, and layers of two kinds.
GPT_OSS = dataclasses.replace(
    MODEL, family="gpt_oss", projection_bias=True, output_bias=True, attention_sinks=True,
    sliding_window=7, full_attention_period=2, expert_bias=True, expert_activation="gpt_oss",
)  # fmt: skip
ONE_LAYER = dataclasses.replace(MODEL, num_layers=1)
#: Two microbatches for each of 8 groups of devices.
RUN = dataclasses.replace(
    SHORT, model=MODEL, batch_size=16, sequence_length=16, overlap="xla", router_z_loss_weight=0.01
)
#: What is compared of each step.
COMPARED = ("loss", "grad_norm", "balance_loss", "router_z_loss", "largest_over_mean")
STEPS, SIZES = 5, MeshSizes(1, 2, 2)


@functools.cache
def curve_of(sizes: MeshSizes, **changes: Any) -> dict[str, np.ndarray]:
    """Metrics of the first steps of a run."""
    return Trainer(dataclasses.replace(RUN, **changes), sizes).run(STEPS)


def assert_same_curve(sizes: tuple[int, int, int], expected: Any = None, **changes: Any) -> None:
    curve, expected = curve_of(MeshSizes(*sizes), **changes), expected or curve_of(ONE_DEVICE)
    for name in COMPARED:
        # Everything is float32, and meshes differ in the order of sums: a relative error of about
        # 1e-6 in a gradient, of which Adam's first steps keep the signs. Measured, curves of five
        # steps differ by at most 1e-6. A gradient that is summed once too often or too rarely
        # changes the first norm by tens of percent.
        np.testing.assert_allclose(curve[name], expected[name], rtol=5e-5, err_msg=name)


@pytest.mark.parametrize(
    ("sizes", "changes"),
    [
        ((1, 2, 2), dict(expert_axes="fsdp", expert_hidden_axis="tensor", zero=3, scan_layers=1)),
        pytest.param(
            (2, 2, 2),
            dict(expert_axes="both", zero=2, gradient_accumulation_steps=2, overlap="ring"),
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            (1, 2, 2),
            dict(expert_axes="tensor", zero=3, weight_gather="matmuls", remat="dots"),
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            (1, 4, 2),
            dict(expert_axes="none", zero=3, weight_gather="blocks", remat="full", scan_layers=2),
            marks=pytest.mark.exhaustive,
        ),
    ],
    ids=str,
)
def test_biases_sinks_and_layers_of_two_kinds_have_the_curve_of_one_device(sizes, changes):
    assert_same_curve(sizes, curve_of(ONE_DEVICE, model=GPT_OSS), model=GPT_OSS, **changes)


def test_all_but_matrices_are_whole_and_do_not_decay():
    model = ModelFunctions(dataclasses.replace(RUN, model=GPT_OSS, scan_layers=1, zero=3), SIZES)
    names = ["attention.output.bias", "attention.sinks", "experts.router.logit_bias"]
    names += [f"experts.b_{name}" for name in ("gate", "up", "down")]
    for name in (f"layers.{name}" for name in names):
        assert name in model.abstract_params
        assert name not in {*model.matrices, *model.sharded_dimensions}
        assert is_vector(name)
    assert model.specs["layers.attention.sinks"] == P(None, "tensor")
    assert not any(map(is_vector, model.matrices))


def covering_cases() -> list[Any]:
    """Few cases that hold all pairs of a mesh, a place of experts and settings."""
    factors: dict[str, list[Any]] = {
        "sizes": [(1, 8, 1), (2, 2, 2), (1, 2, 4)],
        "expert_axes": ["tensor", "fsdp", "both", "none"],
        "expert_hidden_axis": [None, "tensor"],
        "zero": [0, 1, 3],
        "weight_gather": ["blocks", "matmuls"],
        "gradient_accumulation_steps": [1, 2],
        "remat": ["none", "dots", "projections", "full"],
        "recompute_expert_hidden": [False, True],
        "overlap": ["xla", "ring", "ring_direct"],
        "scan_layers": [0, 1],
    }
    cases = [dict(zip(factors, row, strict=True)) for row in itertools.product(*factors.values())]
    few = [cases[number] for number in np.random.default_rng(0).choice(len(cases), 1000, False)]
    # An axis divides the experts or their hidden features.
    divided = [
        case
        for case in few
        if case["expert_hidden_axis"] is None or case["expert_axes"] in ("fsdp", "none")
    ]
    # Layers that are not scanned are compiled one by one: the cases above have two.
    return [
        case if case["scan_layers"] else case | {"model": ONE_LAYER}
        for case in covering(divided, lambda case: case)
    ]


CASES = covering_cases()


def name_of(case: dict[str, Any]) -> str:
    return "-".join(str(case[name]) for name in case if name != "model")


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        ("layers.*,experts", {"expert_mlp", "grouped_matmul", "all_gather_matmul"}),
        pytest.param("layers.*", {"all_gather_matmul"}, marks=pytest.mark.exhaustive),
    ],
)
def test_patterns_that_name_experts_quantize_them(patterns: str, expected: set[str]) -> None:
    changes: dict[str, Any] = {"fp8": "rowwise", "fp8_layers": patterns, "overlap": "ring"}
    trainer = Trainer(dataclasses.replace(RUN, **changes), MeshSizes(1, 2, 2))
    with record_decisions() as decisions:
        trainer.lowered()
    sites: Any = [decision.site for decision in decisions]
    of_experts = {"expert_mlp", "grouped_matmul"}
    narrow = {site.op for site in sites if site.fp8 == "rowwise"}
    assert narrow >= expected
    others = {site.op for site in sites if site.fp8 is None}
    # Weight gradients of this recipe are those of arrays.
    assert others & of_experts == of_experts - expected
    assert narrow & of_experts == of_experts & expected
    assert "grouped_weight_gradient" in others


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "changes",
    [
        {"fp8": "tensorwise", "zero": 3, "gradient_accumulation_steps": 2, "scan_layers": 1},
        {"fp8": "blockwise", "expert_axes": "fsdp", "expert_hidden_axis": "tensor"},
    ],
    ids=str,
)
def test_the_loss_in_8_bits_falls_as_in_float32(changes: dict[str, Any]) -> None:
    changes["fp8_layers"] = "layers.*,experts"
    curve = curve_of(MeshSizes(1, 2, 2), overlap="ring", **changes)["loss"]
    expected = curve_of(ONE_DEVICE)["loss"]
    assert not np.array_equal(curve, expected)
    # Operands are off by up to 6 %, and so are gradients: most signs of Adam's steps are right.
    np.testing.assert_allclose(curve, expected, rtol=0.01)


ZERO_3 = {"fp8": "rowwise", "zero": 3}
WHOLE = {"fp8": "rowwise", "gradient_accumulation_steps": 2}


@pytest.mark.parametrize(
    ("sizes", "changes", "gathered"),
    [
        ((1, 2, 2), ZERO_3 | {"weight_gather": "blocks"}, True),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in (
                ((1, 2, 2), ZERO_3 | {"weight_gather": "matmuls", "scan_layers": 1}, True),
                ((1, 2, 2), ZERO_3 | {"fp8": "blockwise", "expert_axes": "none"}, True),
                ((1, 2, 2), ZERO_3 | {"fp8": "tensorwise", "expert_axes": "fsdp"}, False),
                ((1, 1, 2), WHOLE, False),
                ((1, 1, 2), WHOLE | {"scan_layers": 1, "model": RUN.model}, False),
            )
        ),
    ],
    ids=str,
)
def test_steps_with_experts_that_were_quantized_before(
    sizes: tuple[int, int, int], changes: dict[str, Any], gathered: bool
) -> None:
    """Bit for bit those that quantize in each pass. With ZeRO 3, shards are gathered in 8 bits."""
    changes = {"overlap": "ring_direct", "fp8_layers": "experts", "model": ONE_LAYER, **changes}
    config = dataclasses.replace(RUN, **changes)

    def trained() -> Any:
        trainer = Trainer(config, MeshSizes(*sizes))
        return trainer.run(3), jax.device_get(trained_part(trainer.state))

    once = trained()

    def unchanged(model: ModelFunctions, weights: Any) -> Any:
        return None if model.zero == 3 else weights

    with mock.patch.object(ModelFunctions, "prequantize", unchanged):
        each = trained()
    jax.tree.map(np.testing.assert_array_equal, once, each)
    lines = str(step_of(config, MeshSizes(*sizes))).splitlines()
    in_8_bits = any("= all_gather[" in line and "f8_e4m3fn[" in line for line in lines)
    assert in_8_bits == gathered


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_every_mesh_and_setting_has_the_curve_of_one_device(case):
    expected = curve_of(ONE_DEVICE, **({"model": case["model"]} if "model" in case else {}))
    assert expected["balance_loss"][0] > 2  # k, if experts were balanced.
    assert_same_curve(expected=expected, **case)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("sizes", "changes"),
    [
        ((2, 2, 2), {"expert_axes": "both", "zero": 1}),
        ((1, 4, 2), {"expert_axes": "fsdp", "zero": 3, "scan_layers": 1}),
    ],
    ids=str,
)
def test_muon_has_the_curve_of_one_device(sizes, changes):
    optimizer = dataclasses.replace(RUN.optimizer, kind="muon", muon_dtype="float32")
    expected = curve_of(ONE_DEVICE, optimizer=optimizer)
    assert_same_curve(sizes, expected, optimizer=optimizer, **changes)


@pytest.mark.exhaustive
def test_a_chain_of_resumes_on_other_meshes_has_the_curve_of_one_device(tmp_path: Path):
    """Each run saves its state, and the next one goes on with experts elsewhere."""
    chain = [
        ((1, 4, 2), {"expert_axes": "fsdp", "zero": 1}),
        ((1, 2, 4), {"expert_axes": "tensor", "zero": 3, "scan_layers": 1}),
        ((2, 2, 2), {"expert_axes": "both"}),
        ((1, 1, 2), {"expert_axes": "none", "expert_hidden_axis": "tensor"}),
    ]
    found: list[float] = []
    for number, (sizes, changes) in enumerate(chain):
        trainer = Trainer(dataclasses.replace(RUN, **changes), MeshSizes(*sizes))
        with Checkpoints(tmp_path, resume=number > 0, save_interval=1) as checkpoints:
            if number:
                abstract = state_on_mesh(trainer.model, trainer.optimizer, trainer.mesh)
                restored = checkpoints.restore(abstract)
                trainer.state = restored.state
                trainer.batches.set_state(restored.data_position)
            found += trainer.run(1)["loss"].tolist()
            checkpoints.save(number + 1, trainer.state, trainer.batches.get_state(), {})
    np.testing.assert_allclose(found, curve_of(ONE_DEVICE)["loss"][: len(found)], rtol=5e-5)


def test_a_checkpoint_restores_with_experts_on_other_axes(tmp_path: Path):
    def setting(sizes: MeshSizes, **changes: Any) -> tuple[ModelFunctions, Any, Any]:
        config = dataclasses.replace(RUN, **changes)
        model = ModelFunctions(config, sizes)
        return model, make_optimizer(config.optimizer, 1, model.specs), make_mesh(sizes)

    state = init_state(*setting(MeshSizes(1, 4, 2), expert_axes="fsdp", scan_layers=1))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(0, state, {}, {})
    model, *rest = setting(MeshSizes(2, 2, 2), expert_axes="both", zero=3)
    wanted = state_on_mesh(model, *rest)
    with Checkpoints(tmp_path, resume=True) as checkpoints:
        restored = checkpoints.restore(wanted).state
    for layer, name in itertools.product(range(2), ("w_gate", "w_up", "w_down", "router.kernel")):
        found = restored["params"][f"layers.{layer}.experts.{name}"]
        assert found.sharding == wanted["params"][f"layers.{layer}.experts.{name}"].sharding
        np.testing.assert_array_equal(found, state["params"][f"layers.experts.{name}"][layer])


@pytest.mark.parametrize(
    ("changes", "spec", "gathered", "replicas"),
    [
        # Of fsdp=2 and tensor=2: where E, h and f are, and what gradients are summed over.
        ({"expert_axes": "tensor"}, P("tensor", None, None), None, ("data", "fsdp")),
        ({"expert_axes": "tensor", "zero": 2}, P("tensor", None, "fsdp"), -1, ("data",)),
        ({"expert_axes": "fsdp"}, P("fsdp", None, None), None, ("data",)),
        ({"expert_axes": "fsdp", "zero": 3}, P("fsdp", None, None), None, ("data",)),
        ({"expert_axes": "both", "zero": 1}, P(("fsdp", "tensor"), None, None), None, ("data",)),
        (
            {"expert_axes": "fsdp", "expert_hidden_axis": "tensor", "zero": 3},
            P("fsdp", None, "tensor"),
            None,
            ("data",),
        ),
        (
            {"expert_axes": "none", "zero": 3, "weight_gather": "matmuls"},
            P(None, "fsdp", None),
            -2,
            ("data",),
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("scan_layers", [0, 1])
def test_devices_of_experts_are_no_replicas_of_them(changes, spec, gathered, replicas, scan_layers):
    config = dataclasses.replace(RUN, scan_layers=scan_layers, **changes)
    sizes = MeshSizes(2, 2, 2)
    model = ModelFunctions(config, sizes)
    name = "layers.experts.w_up" if scan_layers else "layers.0.experts.w_up"
    assert P(*model.specs[name][scan_layers:]) == spec
    assert model.sharded_dimensions.get(name) == gathered
    with use_abstract_mesh(make_abstract_mesh(sizes)):
        assert replica_axes(model.specs[name]) == replicas
    # They stay where they are, or are gathered.
    assert name not in model.whole_matrices or (gathered is None and "fsdp" not in spec)
    router = name.replace("w_up", "router.kernel")
    assert router not in model.matrices
    assert router not in model.sharded_dimensions


@pytest.mark.parametrize(
    ("sizes", "changes", "message"),
    [
        ((1, 1, 4), {"num_experts": 6}, "model.num_experts=6 is not divisible by mesh.tensor=4"),
        (
            (1, 8, 2),
            {"expert_axes": "both"},
            "model.num_experts=8 is not divisible by mesh.fsdp=8 × mesh.tensor=2, over which"
            " expert_axes='both'",
        ),
        ((1, 1, 2), {"expert_hidden_axis": "tensor"}, "the axis divides experts already"),
        (
            (1, 1, 4),
            {"expert_axes": "none", "expert_hidden_axis": "tensor", "hidden_features": 46},
            "hidden_features=46 is not divisible by a tensor axis of 4",
        ),
        ((1, 1, 1), {"expert_axes": "data"}, "expected tensor, fsdp, both or none"),
        ((1, 1, 1), {"router_z_loss_weight": -1.0}, "router_z_loss_weight=-1.0: expected 0 or a"),
        ((1, 1, 1), {"overlap": "rewrite-jit"}, "overlap='rewrite-jit': a model with experts"),
        (
            (1, 1, 1),
            {"num_experts": None, "num_experts_per_token": None, "expert_axes": "fsdp"},
            "expert_axes='fsdp': the model has no experts",
        ),
    ],
)
def test_what_does_not_fit_is_refused(sizes, changes, message):
    of_model = {name: changes.pop(name) for name in [*changes] if hasattr(MODEL, name)}
    model = dataclasses.replace(MODEL, **of_model)
    config = dataclasses.replace(RUN, model=model, batch_size=64, **changes)
    with pytest.raises(ValueError, match=message):
        check(config, MeshSizes(*sizes))


@pytest.mark.parametrize(
    ("mesh", "changes", "expected"),
    [
        (MeshConfig(), {"expert_axes": "tensor"}, (2, 1, 4)),
        # Without ZeRO too, fsdp takes what it can divide experts over.
        (MeshConfig(tensor=1), {"expert_axes": "fsdp"}, (1, 8, 1)),
        (MeshConfig(tensor=2), {"expert_axes": "both"}, (1, 4, 2)),
        (MeshConfig(tensor=1), {"expert_axes": "fsdp", "num_experts": 12}, (2, 4, 1)),
    ],
)
def test_sizes_that_are_left_open_divide_the_experts(mesh, changes, expected):
    experts = changes.pop("num_experts", 8)
    model = dataclasses.replace(MODEL, num_experts=experts)
    config = dataclasses.replace(RUN, model=model, mesh=mesh, **changes)
    assert mesh_sizes(config, 8) == MeshSizes(*expected)


def test_memory_has_room_for_the_worst_case_of_a_router():
    """Each layer keeps its hidden features, or none if they are computed again."""
    config = dataclasses.replace(RUN, expert_axes="both", scan_layers=1)
    sizes = MeshSizes(2, 2, 2)
    mesh = make_abstract_mesh(sizes)

    def growth(**changes: Any) -> int:
        """Bytes of two layers more."""
        models = (
            dataclasses.replace(MODEL, num_layers=layers, hidden_features=1024) for layers in (2, 4)
        )
        few, many = (
            memory_of(dataclasses.replace(config, model=model, **changes), mesh).activations
            for model in models
        )
        return many - few

    wide = dataclasses.replace(MODEL, hidden_features=1024)
    again = {"recompute_expert_hidden": True}
    worst = worst_case_bytes(dataclasses.replace(config, model=wide), sizes)
    # 16 sequences of 16 tokens on 8 devices, 4 of which exchange them; gate and up, in float32.
    assert worst == 2 * 4 * (16 * 16 // 8) * 2 * 1024 * 4
    assert growth() - growth(**again) == 2 * worst
    assert growth(remat="dots") - growth(remat="dots", **again) == 2 * worst
    assert growth(remat="full") < worst  # Gradients of two layers.


@pytest.mark.parametrize("remat", ["projections", "attention", "full"])
def test_a_recomputed_feed_forward_has_hidden_features_of_one_device_at_a_time(remat: str) -> None:
    """The expert op computes them again, and no product more often than `jax.checkpoint` would."""
    devices, wide = 4, dataclasses.replace(MODEL, hidden_features=1024)
    config = dataclasses.replace(RUN, model=wide, overlap="ring", remat=remat)
    sizes = MeshSizes(tensor=devices)
    mesh = make_abstract_mesh(sizes)
    asked = dataclasses.replace(config, recompute_expert_hidden=True)
    assert memory_of(config, mesh) == memory_of(asked, mesh)

    def products(config: Config) -> int:
        """Products of experts in a step."""
        live = without_dead_code(step_of(config, sizes))
        return sum(e.primitive.name == "ragged_dot_general" for e in all_equations(live))

    kept = dataclasses.replace(config, remat="none")
    # Gate and up, of each layer, for the tokens of each device.
    assert products(config) - products(kept) == 2 * wide.num_layers * devices


def test_a_run_says_where_experts_are_and_what_they_have_room_for():
    config = dataclasses.replace(RUN, expert_axes="both", gradient_accumulation_steps=2)
    sizes = MeshSizes(2, 2, 2)
    line, room, forward = describe_experts(config, sizes, 1234)
    assert "8 in each layer, 2 for each token, divided over fsdp=2 × tensor=2; 1,234" in line
    worst = worst_case_bytes(config, sizes)
    assert f"room for all tokens at one device: {worst:,} bytes in each layer" in room
    assert "takes a forward more" in forward
    again = dataclasses.replace(config, remat="full", balance_loss_weight=0.0)
    _, room = describe_experts(again, sizes, 1234)
    assert "are computed again" in room
    assert describe_experts(dataclasses.replace(config, model=SHORT.model), sizes, 1) == []


def test_qwen3_30b_a3b_has_3_billion_active_parameters():
    config = dataclasses.replace(RUN, model=families.PRESETS["qwen3-30b-a3b"](), scan_layers=1)
    model = ModelFunctions(config)
    # Its model card says 30.5 and 3.3 billion.
    assert 30.5e9 < model.parameter_count < 30.6e9
    assert 3.3e9 < model.active_parameter_count < 3.4e9
    flops = model_flops_per_token(
        matmul_parameters=config.model.matmul_parameters,
        layers=48, heads=32, head_dim=128, sequence_length=0,
    )  # fmt: skip
    embedding = config.model.vocabulary_size * config.model.features
    norms = 48 * 2 * (2048 + 128) + 2048
    assert flops == 6 * (model.active_parameter_count - embedding - norms)
    # 16,384 tokens per device on 2 GPUs, in bfloat16.
    large = dataclasses.replace(
        config, batch_size=8, sequence_length=4096, compute_dtype="bfloat16"
    )
    assert worst_case_bytes(large, MeshSizes(tensor=2)) == 2 * 2 * 16_384 * 8 * 768 * 2


def test_the_log_shows_the_routers_of_models_with_experts():
    routers = {"balance_loss": 2.125, "router_z_loss": 0.5, "largest_over_mean": 1.75}
    output = io.StringIO()
    with Reporter(Console(file=output, width=200), [], first_step=0, steps=1) as reporter:
        reporter.report(dataclasses.replace(RECORD, **routers))
    header, line = output.getvalue().splitlines()
    assert header.split()[-4:] == ["balance", "z", "loss", "largest/mean"]
    assert line.split()[-3:] == ["2.1250", "0.5000", "1.75"]
