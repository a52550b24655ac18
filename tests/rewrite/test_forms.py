"""Forms of programs that are rewritten, and similar ones that are not: count, reason, results."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from tests.conftest import MeshFactory
from tests.reference import AXIS
from tests.rewrite.forms import FORMS
from tests.rewrite.programs import (
    assert_same,
    collectives,
    results_and_gradients,
    ring,
    sites,
)
from tests.rewrite.simulator import simulated_or_compiled

vma_on_and_off = pytest.mark.parametrize("check_vma", [True, False], ids=["vma", "no_vma"])


@pytest.mark.parametrize("name", FORMS)
@vma_on_and_off
def test_sites_are_replaced_or_left_alone_with_a_reason(
    name: str, check_vma: bool, make_mesh: MeshFactory
) -> None:
    program, replaced, reason = FORMS[name]
    fun, arguments = program.sharded(make_mesh({AXIS: 2}), check_vma), program.arguments()
    found = sites(fun, *arguments)
    assert sum(site.replaced for site in found) == replaced, found
    assert all(site.source is not None and site.source.file.endswith("forms.py") for site in found)
    if reason:
        (left,) = (re.sub(r" at forms\.py:\d+", "", s.reason) for s in found if not s.replaced)
        assert reason in left
        assert collectives(ring(fun), *arguments) == collectives(fun, *arguments)
    else:
        assert len(found) == replaced
        assert set(collectives(ring(fun), *arguments)) <= (
            {"all_gather"} if "psum" in name else set()
        )


@pytest.mark.parametrize("name", [name for name, form in FORMS.items() if form.replaced])
@simulated_or_compiled
def test_values_and_gradients_stay_the_same(
    name: str, run: Callable, make_mesh: MeshFactory
) -> None:
    program = FORMS[name].program
    fun, arguments = program.sharded(make_mesh({AXIS: 2})), program.arguments()
    actual, expected = results_and_gradients(run, (ring(fun), fun), *arguments)
    assert_same(actual, expected, program.rounds or program.dtype)
