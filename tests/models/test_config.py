"""Presets of models, and the mesh axes that they fit."""

from __future__ import annotations

import dataclasses

import pytest

from models.config import debug
from models.families import PRESETS
from models.families.llama3 import llama3_8b, llama3_70b


@pytest.mark.parametrize(
    ("preset", "billions"),
    [
        ("llama3-8b", 8.03),
        ("llama3-70b", 70.6),
        ("llama3-405b", 405.9),
        ("llama3.2-1b", 1.24),
        ("llama3.2-3b", 3.21),
        ("mistral-7b-v0.1", 7.24),
        ("mistral-7b-v0.3", 7.25),
        ("qwen2.5-0.5b", 0.49),
        ("qwen2.5-7b", 7.62),
        ("qwen2.5-72b", 72.7),
        ("qwen3-0.6b", 0.60),
        ("qwen3-8b", 8.19),
        ("qwen3-32b", 32.8),
        ("mixtral-8x7b", 46.7),
        ("qwen3-30b-a3b", 30.5),
    ],
)
def test_presets_have_the_published_number_of_parameters(preset, billions):
    config = PRESETS[preset]()
    norms = (2 * config.num_layers + 1) * config.features
    heads = config.num_heads + 2 * config.num_key_value_heads
    small = config.num_layers * config.head_dim
    small *= heads * config.projection_bias + 2 * config.query_key_norm
    embedding = config.vocabulary_size * config.features * (not config.tied_head)
    idle = (config.num_experts or 1) - (config.num_experts_per_token or 1)
    idle *= config.num_layers * 3 * config.features * config.hidden_features
    total = config.matmul_parameters + norms + small + embedding + idle
    assert round(total / 1e9, 2 if billions < 10 else 1) == billions


@pytest.mark.parametrize(("preset", "billions"), [("mixtral-8x7b", 12.9), ("qwen3-30b-a3b", 3.3)])
def test_a_token_is_multiplied_by_its_own_experts(preset, billions):
    config = PRESETS[preset]()
    embedding = config.vocabulary_size * config.features
    assert round((config.matmul_parameters + embedding) / 1e9, 1) in (billions, billions + 0.1)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"num_experts": 8}, "num_experts=8 and num_experts_per_token=None: give both, or neither"),
        ({"num_experts_per_token": 2}, "num_experts=None and num_experts_per_token=2: give both"),
        (
            {"num_experts": 4, "num_experts_per_token": 5},
            "num_experts_per_token=5: expected at most num_experts=4",
        ),
        ({"router_loss_weight": -0.1}, "router_loss_weight=-0.1: expected 0 or a positive number"),
    ],
    ids=str,
)
def test_experts_that_do_not_fit_are_refused(changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        dataclasses.replace(debug(), **changes)


def test_a_tensor_axis_divides_experts():
    model = PRESETS["mixtral-8x7b"]()
    model.check_tensor_axis(8)
    with pytest.raises(ValueError, match="num_experts=8 is not divisible by a tensor axis of 16"):
        model.check_tensor_axis(16)


def test_any_preset_can_be_cut_to_fewer_layers():
    full, cut = llama3_8b(), dataclasses.replace(llama3_8b(), num_layers=4)
    block = (full.matmul_parameters - cut.matmul_parameters) / 28
    assert block == 4096 * 128 * 2 * 40 + 3 * 4096 * 14_336


def test_a_size_that_the_axis_does_not_divide_is_refused_with_what_works():
    llama3_70b().check_tensor_axis(8)
    with pytest.raises(ValueError) as error:
        llama3_70b().check_tensor_axis(12)
    assert str(error.value) == (
        "num_heads=64 is not divisible by a tensor axis of 12 devices; nearest axes that work for"
        " this model: 8 and 16; nearest num_heads that work: 60 and 72"
    )
    with pytest.raises(ValueError, match=r"nearest num_key_value_heads that work: 2 and 4$"):
        dataclasses.replace(debug(), num_heads=24, num_key_value_heads=3).check_tensor_axis(4)
    with pytest.raises(ValueError, match=r"vocabulary_size=250 .* that work: 248 and 252"):
        dataclasses.replace(debug(), vocabulary_size=250).check_tensor_axis(4)


def test_more_devices_than_key_value_heads_share_them():
    model = llama3_70b()
    model.check_tensor_axis(16)
    assert [model.key_value_copies(size) for size in (1, 8, 16, 64)] == [1, 1, 2, 8]


def test_a_vocabulary_is_padded_to_what_other_axes_divide_too():
    model = dataclasses.replace(debug(), vocabulary_size=250)
    assert model.padded_for(2) is model
    assert model.padded_for(4).vocabulary_rows == 256
    assert model.padded_for(3).vocabulary_rows == 384
    assert model.padded_for(4).padded_for(8) == model.padded_for(4)
    assert model.fits_tensor_axis(8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(num_layers=0), "num_layers=0: expected at least 1"),
        (dict(num_heads=12), "num_heads=12 is not a multiple of num_key_value_heads=8"),
        (dict(norm_epsilon=-1.0), r"norm_epsilon=-1.0: expected a positive number"),
        (dict(padded_vocabulary_size=255), "expected at least vocabulary_size=256"),
        (dict(head_dim=7), "head_dim=7: rotary embedding turns pairs"),
    ],
)
def test_inconsistent_sizes_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(debug(), **change)
