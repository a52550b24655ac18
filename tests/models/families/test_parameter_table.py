"""The tables of parameters describe those of the models."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest

from models.families import FAMILIES, PARAMETERS, parameter_of, parameters_of
from models.hugging_face.tensor_names import tensors
from models.parameters.adapters import TARGETS
from models.parameters.fp8_layers import FP8_LAYERS
from tests.models.families.test_families import MODELS, functions_of


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_has_the_parameters_of_its_table(name: str, stacked: bool) -> None:
    config = MODELS[name]
    functions = functions_of(config, scan_layers=int(stacked))
    # The model has rows for what fills its vocabulary up.
    sizes = dataclasses.replace(config, vocabulary_size=config.vocabulary_rows)
    found = {path.replace("layers.0.", "layers."): path for path in functions.abstract_params}
    expected = {parameter.path: parameter for parameter in parameters_of(config)}
    assert {path for path in found if ".1." not in path} == expected.keys()
    for path, parameter in expected.items():
        leaf, spec = functions.abstract_params[found[path]], functions.specs[found[path]]
        groups = dataclasses.replace(parameter, transposed=False).groups(sizes)
        shape = tuple(size for group in groups for size in group)
        stack = (config.num_experts,) if parameter.of_each_expert else ()
        number = (config.num_layers,) if stacked and parameter.in_layers else ()
        assert leaf.shape == (*number, *stack, *shape), path
        copied = "key_value_heads" in parameter.dimensions and config.num_key_value_heads < 4
        sharded = None if copied else parameter.sharded
        names = [None] * (len(leaf.shape) - len(parameter.dimensions))
        names += ["tensor" if dimension == sharded else None for dimension in parameter.dimensions]
        assert (*spec, *[None] * (len(names) - len(spec))) == (*names,), path


@pytest.mark.parametrize("family", FAMILIES)
def test_no_name_stands_for_two_parameters(family: str) -> None:
    table = FAMILIES[family].parameters
    assert len({parameter.path for parameter in table}) == len(table)
    # The columns of tensors that several share take turns.
    turns = Counter(parameter.tensor for parameter in table)
    assert all(turns[parameter.tensor] == parameter.turn[1] for parameter in table)


def test_families_agree_on_all_but_tensors() -> None:
    for family in FAMILIES.values():
        for parameter in family.parameters:
            own = PARAMETERS[parameter.path]
            assert (own.dimensions, own.sharded, own.role, own.group) == (
                parameter.dimensions, parameter.sharded, parameter.role, parameter.group,
            )  # fmt: skip


def test_what_is_no_parameter_of_a_family_has_no_entry() -> None:
    kernel = "attention.projection.query.kernel"
    assert parameter_of(f"layers.12.{kernel}") is parameter_of(f"layers.{kernel}")
    assert parameter_of("layers.12.attention.projection.query.lora_a") is None


def test_adapters_and_layers_in_8_bits_are_those_of_the_tables() -> None:
    assert TARGETS == (
        "attention.projection.query", "attention.projection.key", "attention.projection.value",
        "attention.output", "feed_forward.gate", "feed_forward.up", "feed_forward.down",
    )  # fmt: skip
    groups = {parameter.group for parameter in PARAMETERS.values()} - {None}
    assert {(group.name, group.scope) for group in groups if group} == {*FP8_LAYERS.items()}


def test_tensors_follow_the_table() -> None:
    config = MODELS["experts"]
    names = [name for name, _ in tensors(config)]
    assert names[0] == "embedding"
    assert names[-2:] == ["norm.scale", "head.kernel"]
    assert names.count("layers.0.experts.w_gate") == config.num_experts
