"""PyTorch's decoder computes what the generator does, on several devices, by every attention."""

# PyTorch is not a dependency: where it is not installed, nothing here is imported.
# pyright: reportMissingImports=false

from __future__ import annotations

import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from benchmarks.pytorch import GENERATION_NAMES
from benchmarks.pytorch.runner import time_pytorch
from models.config import debug
from models.generation import Generator
from models.generation.generator import make_mesh
from models.layers import rotary

torch: Any = pytest.importorskip("torch", reason="PyTorch is not installed")

from benchmarks.pytorch.llama import torch_generation  # noqa: E402
from benchmarks.pytorch.llama.torch_attention import ATTENTIONS  # noqa: E402
from benchmarks.pytorch.llama.torch_decoder import (  # noqa: E402
    Functions,
    LayerWeights,
    TorchDecoder,
    Weights,
)
from benchmarks.pytorch.llama.torch_generation import TorchGeneration  # noqa: E402
from benchmarks.pytorch.torch_programs import Place  # noqa: E402

DEVICES, PROMPT, CAPACITY, NEW = 2, 12, 32, 9
CONFIG = debug()
CASE: dict[str, Any] = {
    **{"name": "2", "candidates": GENERATION_NAMES, "batch": 2, "prompt": PROMPT},
    **{"model": dataclasses.asdict(CONFIG), "frequencies": rotary.frequencies(CONFIG).tolist()},
    **{"capacity": CAPACITY, "launch": 3, "seed": 1, "groups": 2, "prefill": True},
}
CPU = torch.device("cpu")


class Threads:
    """Devices that are threads of this process."""

    def __init__(self, devices: int):
        self.barrier = threading.Barrier(devices, timeout=60)
        self.terms: list[Any] = [None] * devices

    def of(self, rank: int) -> Any:
        def gather(x: Any) -> Any:
            self.terms[rank] = x
            self.barrier.wait()
            gathered = torch.stack(self.terms)
            self.barrier.wait()
            return gathered

        return SimpleNamespace(gather=gather, sum=lambda term: gather(term).sum(0))


def weights_of(params: dict[str, np.ndarray], rank: int) -> Weights:
    """A device's shards of JAX's parameters, whose matrices are [in, out]."""

    def columns(*names: str) -> Any:
        shards = []
        for name in names:
            kernel = params[f"{name}.kernel"]
            shards.append(np.split(kernel, DEVICES, axis=1)[rank].reshape(len(kernel), -1).T)
        return torch.tensor(np.concatenate(shards))

    def rows(name: str) -> Any:
        shard = np.split(params[f"{name}.kernel"], DEVICES)[rank]
        return torch.tensor(shard.reshape(-1, shard.shape[-1]).T.copy())

    def whole(name: str) -> Any:
        return torch.tensor(params[name])

    def layer(name: str) -> LayerWeights:
        heads = (f"{name}.attention.projection.{part}" for part in ("query", "key", "value"))
        return LayerWeights(
            whole(f"{name}.attention_norm.scale"),
            columns(*heads),
            rows(f"{name}.attention.output"),
            whole(f"{name}.feed_forward_norm.scale"),
            columns(f"{name}.feed_forward.gate", f"{name}.feed_forward.up"),
            rows(f"{name}.feed_forward.down"),
        )

    layers = [layer(f"layers.{number}") for number in range(CONFIG.num_layers)]
    return Weights(whole("embedding"), layers, whole("norm.scale"), columns("head"))


@pytest.fixture(scope="module")
def answered() -> tuple[dict[str, np.ndarray], np.ndarray, list[list[int]]]:
    """Parameters, prompts, and the tokens that the generator answers with."""
    generator = Generator(CONFIG, mesh=make_mesh(DEVICES), implementation="xla", dtype="float32")
    random = np.random.default_rng(0)
    params = {
        # Weights with which each token depends on all before it.
        name: random.normal(scale=0.3, size=leaf.shape).astype("float32") + (leaf.ndim == 1)
        for name, leaf in generator.abstract_params.items()
    }
    prompts = random.integers(CONFIG.vocabulary_size, size=(2, PROMPT))
    sharded = {
        name: jax.device_put(params[name], leaf.sharding)
        for name, leaf in generator.abstract_params.items()
    }
    return params, prompts, generator(sharded, prompts.tolist(), max_new_tokens=NEW)


def flash_attention(query, key, value, queries, keys, *lengths, seqused_k):
    """Stands in for PyTorch's operator, which CPUs do not have, with one query of each sequence."""
    assert lengths == (1, CAPACITY, 0.0, False, False)
    outputs = []
    for number, used in enumerate(seqused_k.tolist()):
        (row,) = query[queries[number] : queries[number + 1]]
        own = slice(int(keys[number]), int(keys[number]) + used)
        heads = [part[own].transpose(0, 1)[None] for part in (key, value)]
        attend = torch.nn.functional.scaled_dot_product_attention
        outputs.append(attend(row[None, :, None], *heads, enable_gqa=True)[0, :, 0])
    return torch.stack(outputs), None


@pytest.mark.parametrize("kind", ATTENTIONS)
def test_tokens_are_those_of_the_generator(
    kind: str, answered: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", flash_attention)
    params, prompts, expected = answered
    threads = Threads(DEVICES)

    def decode(rank: int) -> list[Any]:
        frequencies, place = rotary.frequencies(CONFIG).tolist(), Place(rank, DEVICES, CPU)
        options = {"batch": 2, "capacity": CAPACITY, "attention": ATTENTIONS[kind]}
        decoder = TorchDecoder(CONFIG, frequencies, weights_of(params, rank), place, **options)
        decoder.prefill(Functions(), threads.of(rank), torch.tensor(prompts))
        tokens = [decoder.token.clone()]
        for _ in range(NEW - 1):
            decoder.step(Functions(), threads.of(rank))
            tokens.append(decoder.token.clone())
        return torch.stack(tokens, dim=1).tolist()

    with ThreadPoolExecutor(DEVICES) as pool:
        for answers in pool.map(decode, range(DEVICES)):
            assert answers == expected


class Alone:
    """A worker on one device, which measures nothing."""

    place = Place(0, 1, CPU)
    compiler: str | None = "inductor"

    def together(self, step: Any) -> Any:
        try:
            return step()
        except Exception as error:
            raise torch_generation.Failure(str(error)) from error

    def measure(self, runs: dict[str, Any], groups: int) -> dict[str, list[float]]:
        for run in runs.values():
            run()
        seconds = (3.0 if name == "default" else 1.5 for name in runs)
        return {name: [one] * groups for name, one in zip(runs, seconds, strict=True)}

    def captured(self, run: Any) -> Any:
        return run

    def largest(self, value: float) -> float:
        return value

    def out_of_time(self) -> bool:
        return False

    def log(self, line: str) -> None:
        del line


@pytest.fixture
def generation(monkeypatch: pytest.MonkeyPatch) -> TorchGeneration:
    """The candidates on one device, compiled up to the kernels."""
    compile_of = torch.compile

    def compile_without_kernels(function: Any, mode: str = "", **options: Any) -> Any:
        return compile_of(function, backend="aot_eager", **options)

    monkeypatch.setattr(torch, "compile", compile_without_kernels)
    found = TorchGeneration(Alone(), CASE, torch.float32)
    found.collectives = Threads(1).of(0)
    return found


@pytest.mark.filterwarnings("ignore")  # Those of the compiler.
def test_compiled_candidates_take_the_fastest_mode(generation: TorchGeneration) -> None:
    eager, compiled, symmetric = generation.results()
    assert eager["options"] == "attention by matmuls, eager"
    assert compiled["options"] == "attention by matmuls, max-autotune-no-cudagraphs"
    assert compiled["tried"].keys() >= {*torch_generation.MODES, "matmuls", "sdpa"}
    assert compiled["samples"] == [0.5, 0.5] and compiled["prefill"] == [1.5, 1.5]
    assert symmetric["failure"].startswith("max-autotune-no-cudagraphs: ")


@pytest.mark.parametrize("name", ["attention_layer", "feed_forward_layer"])
def test_a_candidate_with_other_logits_is_not_timed(
    name: str, generation: TorchGeneration, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(mode: str) -> Functions:
        functions = Functions()
        if mode == "eager":
            return functions
        right = getattr(functions, name)
        return functions._replace(**{name: lambda *given: (right(*given)[0], given[-1])})

    monkeypatch.setattr(generation, "compiled", wrong)
    eager, compiled, _ = generation.results()
    assert "samples" in eager and "samples" not in compiled
    assert "default: wrong: logits have a relative error of" in compiled["failure"]
    assert ("prefill" in compiled) == (name == "attention_layer")


def test_processes_decode_together() -> None:
    results, reason = time_pytorch(
        [CASE, {**CASE, "name": "1", "batch": 1, "prefill": False}],
        **{"devices": DEVICES, "platform": "cpu", "dtype": "bfloat16", "limit_seconds": 90.0},
        **{"groups": 2, "group_seconds": 1e-6},
    )
    assert reason is None
    found = {(result["name"], result["candidate"]): result for result in results}
    for name, candidate in [(name, c) for name in "21" for c in GENERATION_NAMES]:
        result = found[name, candidate]
        if candidate == "torch_symm_mem":
            assert "SymmetricMemory does not support device type cpu" in result["failure"]
        else:
            assert len(result["samples"]) == 2 and min(result["samples"]) > 0
            assert ("prefill" in result) == (name == "2")
