"""The tool that compares the dry run with compiled steps. GPUs compile them in tests/gpu."""

from __future__ import annotations

import pytest

from tests.train.compiled_memory import (
    CASES,
    DEPTHS,
    CompiledStep,
    added_by_a_layer,
    as_text,
    sharded,
)
from train.config.checks import check
from train.memory.step_memory import Memory

ALL = [*CASES, *(case for pair in DEPTHS for case in pair)]
#: Parameters of a block of Llama 3 8B: attention, feed-forward, two norms.
LAYER = 4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 14336 + 2 * 4096


@pytest.mark.parametrize("case", ALL, ids=str)
def test_configurations_are_valid(case):
    check(case.config, case.sizes)


@pytest.mark.parametrize("scan_layers", [0, 1])
def test_a_layer_adds_gradients_an_input_and_the_rest(scan_layers):
    shallow, deep = (sharded(n, "blocks", scan_layers=scan_layers) for n in (8, 12))
    added = 2 * LAYER + 2 * 8192 * 4096 + 10**6
    steps = {
        str(case): CompiledStep(0, case.layers * added, 0, Memory(0, 0, 0, 0), 0.0, 0.0)
        for case in (shallow, deep)
    }
    name, *cells = added_by_a_layer(lambda case: steps[str(case)], shallow, deep)
    assert name.endswith("12 layers")
    assert cells == ["504", "436", "67", "1", "436"]


def test_descriptions_of_devices_are_in_the_format_of_protocol_buffers():
    assert (
        as_text({"a": {"b": 1, "c": {}}, "d": "e", "f": 1.5}) == 'a { b: 1 c {  } } d: "e" f: 1.5'
    )
