"""Models of every family compute what Hugging Face's own library does with the same files."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from models.generation import Generator, decoder
from models.generation.generator import make_mesh
from models.hugging_face import ModelFolder, load
from models.hugging_face.tensor_names import tensors
from tests.models.hugging_face.folders import DATA, NAMES


def loaded(name: str, devices: int, implementation: str = "ring") -> tuple[Generator, Any]:
    folder = ModelFolder(DATA / name)
    mesh = make_mesh(devices)
    made = Generator(folder.config, mesh=mesh, implementation=implementation, dtype="float32")
    return made, load(folder, made.abstract_params)


def logits_of(generator: Generator, params: Any, tokens: np.ndarray) -> jax.Array:
    specs = {name: leaf.sharding.spec for name, leaf in generator.abstract_params.items()}
    mapped = jax.shard_map(
        lambda params, tokens: generator.model(params)(tokens),
        mesh=generator.mesh,
        in_specs=(specs, P()),
        out_specs=P(None, None, "tensor"),
    )
    return jax.jit(mapped)(params, tokens)


#: Their layers are decoded as those of other files: with other rotary frequencies, without windows,
#: with a router that does not normalize. Their whole logits are compared by default.
DECODED_AS_OTHERS = ("llama3.2", "mistral-no-window", "qwen3-moe-not-normalized", "mixtral")
#: Has most kinds of tensors of the models that compile fast.
IN_ALL_WAYS = "qwen2"


def _by_default(
    devices: int,
    further: int | None,
    ways: list[tuple[int, str]],
    exhaustive: Collection[str] = (),
) -> list[Any]:
    """Each file by a ring of `devices`, and exhaustively of `further`; one file in all ways."""
    rings = (devices, "ring"), (further, "ring")
    return [
        pytest.param(
            name,
            *way,
            marks=()
            if (way == rings[0] and name not in exhaustive) or name == IN_ALL_WAYS
            else pytest.mark.exhaustive,
        )
        for name in NAMES
        for way in ways
        if way in rings or name == IN_ALL_WAYS
    ]


@pytest.mark.parametrize(
    ("name", "devices", "implementation"),
    _by_default(2, 4, [(1, "xla"), (2, "ring"), (2, "xla"), (4, "ring")]),
)
def test_logits_are_those_of_the_library_that_made_the_files(name, devices, implementation):
    generator, params = loaded(name, devices, implementation)
    expected = np.load(DATA / name / "expected.npz")
    computed = logits_of(generator, params, expected["tokens"])
    logits = expected["logits"]
    # Both are float32. A thousandth of this is seen.
    assert np.max(np.abs(computed - logits)) < 1e-4 * np.max(np.abs(logits))


@pytest.mark.parametrize(
    ("name", "devices", "implementation"),
    _by_default(4, None, [(1, "xla"), (2, "ring"), (4, "ring")], DECODED_AS_OTHERS),
)
def test_token_by_token_the_logits_are_the_same(name, devices, implementation):
    """After a prefill of 4 tokens, the others are decoded one after the other."""
    generator, params = loaded(name, devices, implementation)
    expected = np.load(DATA / name / "expected.npz")
    specs = {name: leaf.sharding.spec for name, leaf in generator.abstract_params.items()}

    def run(params: Any, tokens: jax.Array) -> jax.Array:
        model = generator.model(params)
        lengths = jnp.full(len(tokens), 4)
        logits, caches = decoder.prefill(model, tokens[:, :4], lengths, tokens.shape[1])

        def step(carry: Any, token: jax.Array) -> Any:
            positions, caches = carry
            logits, caches = decoder.decode(model, token, positions, caches)
            return (positions + 1, caches), logits

        _, others = jax.lax.scan(step, (lengths, caches), tokens[:, 4:].T)
        return jnp.concatenate([logits[None], others])

    mapped = jax.shard_map(
        run, mesh=generator.mesh, in_specs=(specs, P()), out_specs=P(None, None, "tensor")
    )
    logits = np.swapaxes(jax.jit(mapped)(params, expected["tokens"]), 0, 1)
    whole = expected["logits"]
    assert np.max(np.abs(logits - whole[:, 3:])) < 1e-4 * np.max(np.abs(whole))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("llama3", {"rotary_scaling": {"factor": 1.0}}),
        ("llama3.2", {"rotary_base": 10_000.0}),
        ("mistral", {"sliding_window": None}),
        ("qwen2", {"norm_epsilon": 1e-1}),
    ],
)
def test_what_config_json_says_matters(name, change):
    folder = ModelFolder(DATA / name)
    if "rotary_scaling" in change:
        scaling = dataclasses.replace(folder.config.rotary_scaling, **change["rotary_scaling"])
        change = {"rotary_scaling": scaling}
    config = dataclasses.replace(folder.config, **change)
    made = Generator(config, mesh=make_mesh(1), dtype="float32")
    params = load(folder, made.abstract_params)
    expected = np.load(DATA / name / "expected.npz")
    logits = logits_of(made, params, expected["tokens"])
    difference = np.max(np.abs(logits - expected["logits"]))
    assert difference > 1e-3 * np.max(np.abs(expected["logits"]))


def test_each_device_reads_its_own_part(monkeypatch):
    folder, read = ModelFolder(DATA / "llama3"), []

    def counted(name, index):
        part = ModelFolder.read(folder, name, index)
        read.append((name, part.size))
        return part

    monkeypatch.setattr(folder, "read", counted)
    generator = Generator(folder.config, mesh=make_mesh(2))
    load(folder, generator.abstract_params)
    largest = {tensor.name: int(np.prod(tensor.shape)) for _, tensor in tensors(folder.config)}
    for name, size in read:
        whole = "norm" in name
        assert size == largest[name] // (1 if whole else 2), name


def test_any_dimension_may_be_sharded_and_a_vocabulary_padded():
    folder = ModelFolder(DATA / "qwen2")
    mesh = make_mesh(4)
    name = "layers.1.attention.projection.query.kernel"
    whole = load(folder, {name: leaf((32, 4, 8), mesh, P())})[name]
    for spec in (P("tensor"), P(None, "tensor"), P(None, None, "tensor")):
        np.testing.assert_array_equal(
            load(folder, {name: leaf((32, 4, 8), mesh, spec)})[name], whole
        )
    table = load(folder, {"embedding": leaf((288, 32), mesh, P())})["embedding"]
    padded = load(folder, {"embedding": leaf((384, 32), mesh, P("tensor"))})["embedding"]
    np.testing.assert_array_equal(padded[:288], table)
    assert not np.any(padded[288:])


def test_stacked_layers_are_those_of_each_layer():
    folder = ModelFolder(DATA / "qwen2")
    mesh, path = make_mesh(2), "attention.projection.key.bias"
    layers = [f"layers.{n}.{path}" for n in range(2)]
    each = load(folder, {name: leaf((2, 8), mesh, P("tensor")) for name in layers})
    stacked = load(folder, {f"layers.{path}": leaf((2, 2, 8), mesh, P(None, "tensor"))})
    np.testing.assert_array_equal(stacked[f"layers.{path}"], jnp.stack([each[n] for n in layers]))


def leaf(shape: tuple[int, ...], mesh: Any, spec: P) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, "float32", sharding=NamedSharding(mesh, spec))
