"""The benchmark of generation: what is compared before it is timed, and the tables."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.generation import generation, generation_tables
from benchmarks.generation.generation import Generation
from benchmarks.generation.generation_programs import compile_all, make_generator
from benchmarks.measuring.settings import make_mesh
from benchmarks.pytorch import GENERATION_NAMES, runner

SETTINGS = Generation(
    platform="cpu",
    devices=2,
    preset="debug",
    layers=1,
    prompt=8,
    batches=(1, 2),
    prefill_limit=1,
    groups=2,
    group_seconds=1e-6,
    dtype="float32",
)


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A report in which one candidate embeds other tokens, and one of PyTorch has failed."""
    patch = pytest.MonkeyPatch()
    generator_of = generation.make_generator

    def generator_with_wrong_one(name: str, *arguments: Any) -> Any:
        generator = generator_of("xla" if name == "wrong" else name, *arguments)
        if name == "wrong":
            model = generator.model

            def wrong(params: Any) -> Any:
                return model({**params, "embedding": jnp.flip(params["embedding"])})

            generator.model = wrong
        return generator

    def time_pytorch(cases: Any, **options: Any) -> tuple[list[dict[str, Any]], None]:
        assert [(case["batch"], case["prefill"]) for case in cases] == [(1, True), (2, False)]
        assert options["devices"] == 2
        one = {"candidate": "torch", "options": "eager", "tried": {"eager": 2e-3}}
        found = [{**one, "name": case["name"], "samples": [1e-3, 3e-3]} for case in cases]
        return [{**found[0], "prefill": [4.0, 4.0]}, found[1]], None

    patch.setattr(generation, "make_generator", generator_with_wrong_one)
    patch.setattr(runner, "time_pytorch", time_pytorch)
    names = ("auto", "xla", "baseline", "wrong")
    settings = dataclasses.replace(
        SETTINGS, candidates=names, pytorch=True, output=tmp_path_factory.mktemp("report")
    )
    report = generation.run(settings)
    patch.undo()
    return report.content


def test_every_candidate_is_timed_but_a_wrong_one(content: dict[str, Any]) -> None:
    # Where prefill is not timed, that of baseline serves all.
    for case, has_prefill, place in zip(
        content["cases"], (True, False), ("first", "second"), strict=True
    ):
        assert list(case["times"]["decode"]) == ["auto", "xla", "baseline", "torch"]
        assert bool(case["times"]["prefill"]) == has_prefill
        assert {len(samples) for samples in case["times"]["decode"].values()} == {2}
        assert case["failures"]["wrong"].endswith(f"of 16 {place} tokens are those of baseline")
        assert case["failures"].keys() == {"wrong", *GENERATION_NAMES[1:]}


def test_tables_have_all_candidates_and_the_gain_over_each(content: dict[str, Any]) -> None:
    rates, speedups, notes = (section(content) for section in generation_tables.SECTIONS)
    assert "| 1 | torch | 2 | 500 | 2.000 | 100.0% |" in rates
    assert "| 2 | torch | – | 1,000 | 2.000 | 100.0% |" in rates
    case = content["cases"][0]
    case["times"]["decode"] = {
        **{"auto": [1.0], "xla": [1.5], "baseline": [1.25], "torch": [3.0]},
        "torch_compiled": [2.0],
    }
    speedups = generation_tables.speedups({"cases": [case]})
    header, decode = speedups.splitlines()[2], speedups.splitlines()[-1]
    columns = ["xla", "baseline", "torch", "torch_compiled"]
    groups = [f"fastest of {name}" for name in ("JAX's collectives", "PyTorch")]
    assert header == f"| batch |  | {' | '.join(columns + groups)} |"
    assert decode == "| 1 | decode | 1.50× | 1.25× | 3.00× | 2.00× | 1.25× | 2.00× |"
    assert "- batch 1, torch: eager (ms: eager 2.000)" in notes
    assert "- batch 2, wrong: wrong: " in notes


def test_launches_that_share_a_cache_decode_the_same_tokens_each_time() -> None:
    mesh = make_mesh(dataclasses.replace(SETTINGS, devices=1))
    config, names = generation.PRESETS["debug"](), ("xla", "baseline")
    settings = dataclasses.replace(SETTINGS, devices=1, batches=(1,))
    generators = {name: make_generator(name, config, mesh, settings.array_dtype) for name in names}
    prompts, lengths = np.arange(16, dtype=np.int32).reshape(2, 1, 8), np.full(1, 8, np.int32)
    with jax.set_mesh(mesh):
        params = generation._random(generators["xla"])
        programs = compile_all(generators, {1: {}}, settings.prompt, settings.prefill_limit)[1]
        one, other = generation._launches(programs, params, prompts[1], lengths).values()
        first, *others = (np.asarray(launch()) for launch in (one, other, other, one))
        tokens = generation._first_tokens(programs["xla"], params, prompts, lengths)
    for each in others:
        np.testing.assert_array_equal(first, each)
    assert tokens[1, 1] == first[0]


@pytest.mark.parametrize(
    ("first", "second", "reason"),
    [
        ([1, 2, 3, 4], [1, 2, 3, 4], None),
        ([1, 0, 0, 0], [1, 9, 9, 9], None),  # Close logits may be rounded in another way.
        ([0, 0, 0, 0], [1, 2, 3, 4], "wrong: 0 of 4 first tokens are those of xla"),
        ([1, 2, 3, 0], [9, 9, 9, 4], "wrong: 0 of 3 second tokens are those of xla"),
    ],
)
def test_other_tokens_than_those_of_plain_jax_are_wrong(
    first: list[int], second: list[int], reason: str | None
) -> None:
    tokens = {"xla": np.array([[1, 2, 3, 4]] * 2), "auto": np.array([first, second])}
    assert generation._disagreements(tokens).get("auto") == reason


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"preset": "qwen3-8b"},
            "preset='qwen3-8b': PyTorch's model has no query_key_norm; choose",
        ),
        ({"devices": 3}, "devices=3: PyTorch's model needs a divisor of num_heads=16"),
    ],
)
def test_what_pytorch_cannot_run_is_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        generation.run(dataclasses.replace(SETTINGS, pytorch=True, output=Path("/"), **changes))
