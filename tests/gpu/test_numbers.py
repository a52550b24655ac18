"""Every implementation computes every shape, in every surrounding: results and gradients."""

from __future__ import annotations

import pytest

from tests.gpu.ops import all_problems
from tests.gpu.problems import Call, assert_right, calls
from tests.gpu.stacks import all_stacks

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("call", calls([*all_problems(4), *all_problems(2)]), ids=str)
def test_ops(ready, call: Call) -> None:
    called = ready(call)
    assert_right(called.judge(called.run()))


@pytest.mark.parametrize("call", calls(all_stacks()), ids=str)
def test_stacks(ready, call: Call) -> None:
    called = ready(call)
    assert_right(called.judge(called.run()))
