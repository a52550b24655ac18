"""Presets of models, and the mesh axes that they fit."""

from __future__ import annotations

import dataclasses

import pytest

from models.config import PRESETS, debug, llama3_8b, llama3_70b


@pytest.mark.parametrize(
    ("preset", "billions"), [("llama3-8b", 8.03), ("llama3-70b", 70.6), ("llama3-405b", 405.9)]
)
def test_presets_have_the_published_number_of_parameters(preset, billions):
    config = PRESETS[preset]()
    norms = (2 * config.num_layers + 1) * config.features
    embedding = config.vocabulary_size * config.features
    total = config.matmul_parameters + norms + embedding
    assert round(total / 1e9, 2 if billions < 10 else 1) == billions


def test_any_preset_can_be_cut_to_fewer_layers():
    full, cut = llama3_8b(), dataclasses.replace(llama3_8b(), num_layers=4)
    block = (full.matmul_parameters - cut.matmul_parameters) / 28
    assert block == 4096 * 128 * 2 * 40 + 3 * 4096 * 14_336


def test_a_size_that_the_axis_does_not_divide_is_refused_with_what_works():
    llama3_70b().check_tensor_axis(8)
    with pytest.raises(ValueError) as error:
        llama3_70b().check_tensor_axis(16)
    assert str(error.value) == (
        "num_key_value_heads=8 is not divisible by a tensor axis of 16 devices; nearest"
        " num_key_value_heads that work: 16; nearest axes that work for this model: 4 and 8"
    )
    with pytest.raises(ValueError, match=r"vocabulary_size=250 .* that work: 248 and 252"):
        dataclasses.replace(debug(), vocabulary_size=250).check_tensor_axis(4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(num_layers=0), "num_layers=0: expected at least 1"),
        (dict(num_heads=12), "num_heads=12 is not a multiple of num_key_value_heads=8"),
        (dict(norm_epsilon=-1.0), r"norm_epsilon=-1.0: expected a positive number"),
        (dict(head_dim=7), "head_dim=7: rotary embedding turns pairs"),
    ],
)
def test_inconsistent_sizes_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(debug(), **change)
