"""Times prefill and decoding of one batch, as `benchmarks.generation.generation` asks for.

A token is one CUDA graph, as far as there are such. Compiled candidates try the compiler's own
choices of matmuls and its search for them.
"""

# PyTorch is not a dependency: where it is not installed, nothing here is imported.
# pyright: reportMissingImports=false

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention import sdpa_kernel

from benchmarks.pytorch.llama.torch_attention import ATTENTIONS, Attention, Cache, DecodeStep
from benchmarks.pytorch.llama.torch_decoder import (
    DecoderCollectives,
    Functions,
    TorchDecoder,
    begin,
    random_weights,
    sizes_of,
)
from benchmarks.pytorch.llama.torch_training import ATTENTION
from benchmarks.pytorch.torch_communication import AsyncTensorParallel
from benchmarks.pytorch.torch_programs import Failure, Measuring, Run, relative_error
from models.config import config_from_json

#: The modes of `torch.compile` that are tried.
MODES = ("default", "max-autotune-no-cudagraphs")
EAGER = "eager"
#: Groups that decide between attentions and between modes.
TRIAL_GROUPS = 3
#: Largest relative error of logits after a token. Rounding to bfloat16 in another order leaves some
#: hundredths after all layers; logits of another token are off by more than 1.
TOLERANCE = 0.2


class Nccl:
    """NCCL's collectives, or Gloo's where there are no GPUs."""

    def sum(self, term: Tensor) -> Tensor:
        dist.all_reduce(term)
        return term

    def gather(self, x: Tensor) -> Tensor:
        devices = dist.get_world_size()
        gathered = x.new_empty(devices * len(x), *x.shape[1:])
        dist.all_gather_into_tensor(gathered, x)
        return gathered.unflatten(0, (devices, -1))


class OneShot(Nccl):
    """Sums by one kernel that reads all devices' terms in symmetric memory, without multicast."""

    def __init__(self, device: torch.device, like: Tensor):
        from torch.distributed import _symmetric_memory

        self.group = AsyncTensorParallel(device).group
        self.buffer = _symmetric_memory.empty(like.shape, dtype=like.dtype, device=device)
        _symmetric_memory.rendezvous(self.buffer, self.group)

    def sum(self, term: Tensor) -> Tensor:
        summed = torch.ops.symm_mem.one_shot_all_reduce_copy
        return summed(self.buffer, term, "sum", self.group)


def compiled(mode: str) -> Functions:
    """The functions of a decoder, compiled; with EAGER, as they are."""
    if mode == EAGER:
        return Functions()

    def one(function: Callable) -> Callable:
        return torch.compile(function, fullgraph=True, dynamic=False, mode=mode)

    return Functions(*map(one, Functions()))


class TorchGeneration:
    """The candidates of one case, which share weights and cache.

    Args:
      worker: measures.
      case: name, candidates, model, frequencies, batch, prompt, capacity, seed; launch, the tokens
        that are decoded from the end of the prompts on; prefill, whether that is timed.
      dtype: of all arrays.
    """

    def __init__(self, worker: Measuring, case: dict[str, Any], dtype: torch.dtype):
        self.worker, self.case, self.collectives = worker, case, Nccl()
        self.config, self.dtype = config_from_json(case["model"]), dtype
        self.compiled = functools.cache(compiled)
        self.modes = MODES if worker.compiler else (EAGER,)
        self.found: dict[str, dict[str, Any]] = {
            name: {"candidate": name, "name": case["name"], "tried": {}}
            for name in case["candidates"]
        }

    def results(self) -> list[dict[str, Any]]:
        """Each candidate's seconds per token, and per prefill, in each group; or a failure."""
        try:
            kind, tried = self.fastest_attention()
            self.worker.together(lambda: self.build(ATTENTIONS[kind]))
            with sdpa_kernel(ATTENTION, set_priority=True):
                self.measure_prefill()
        except Failure as failure:
            return [{**result, "failure": str(failure)} for result in self.found.values()]
        launches = self.launches()
        for name, samples in self.worker.measure(launches, self.case["groups"]).items():
            result = self.found[name]
            result["samples"] = [seconds / self.case["launch"] for seconds in samples]
            result["tried"] |= tried
            result["options"] = f"attention by {kind}, {result['options']}"
        return list(self.found.values())

    def fastest_attention(self) -> tuple[str, dict[str, float]]:
        """The fastest of `ATTENTIONS`, and seconds of all layers' by each that is right."""
        tried: dict[str, float] = {}
        for kind, attention in ATTENTIONS.items():
            run = functools.partial(self.attention_of_layers, attention)
            try:
                runs = {kind: self.worker.together(run)}
            except Failure as failure:
                self.worker.log(f"attention by {kind}: {failure}")
                continue
            tried[kind] = statistics.median(self.worker.measure(runs, TRIAL_GROUPS)[kind])
        if not tried:
            raise Failure("no attention runs")
        return min(tried, key=tried.__getitem__), tried

    def attention_of_layers(self, attention: Attention) -> Run:
        """The attention of a token in all layers; raises ValueError if it is wrong."""
        place, case = self.worker.place, self.case
        sizes, capacity = sizes_of(self.config, place.devices), case["capacity"]
        options = {"dtype": self.dtype, "device": place.device}
        query = torch.randn(case["batch"], sizes.heads, sizes.head_dim, **options)
        new = case["batch"], capacity, sizes.key_value_heads, sizes.head_dim
        key, value = (torch.randn(new, **options) for _ in range(2))
        position = torch.full((1,), case["prompt"], device=place.device)
        waves = torch.zeros(capacity, 1, device=place.device)
        token = torch.zeros(case["batch"], dtype=torch.int64, device=place.device)
        _, seen, lengths, *_ = begin(query[0], (waves, waves), token, position)
        step = DecodeStep(position, seen, lengths, waves, waves)
        places = torch.arange(capacity, device=place.device)

        def filled(attention: Attention, key: Tensor, value: Tensor) -> Cache:
            shape = case["batch"], sizes.key_value_heads, capacity, sizes.head_dim
            cache = attention.empty(key, *shape)
            attention.write(cache, key, value, places)
            return cache

        reference = ATTENTIONS["matmuls"]
        wide = filled(reference, key.float(), value.float())
        expected = reference.attend(query.float(), wide, step)
        caches = [filled(attention, key, value) for _ in range(self.config.num_layers)]
        attend = attention.attend
        if self.worker.compiler:
            attend = torch.compile(attend, fullgraph=True, dynamic=False)
        if (error := relative_error([attend(query, caches[0], step)], [expected])) > TOLERANCE:
            raise ValueError(f"relative error {error:.3g}")

        def run() -> list[Tensor]:
            return [attend(query, cache, step) for cache in caches]

        return self.graph_of(run)

    def build(self, attention: Attention) -> None:
        """Makes weights and prompts, and the eager state after the prompts."""
        place, case = self.worker.place, self.case
        weights = random_weights(self.config, place, self.dtype, case["seed"])
        generator = torch.Generator(place.device)
        generator.manual_seed(case["seed"])
        size, options = (case["batch"], case["prompt"]), {"device": place.device}
        vocabulary = self.config.vocabulary_size
        self.prompts = torch.randint(vocabulary, size, generator=generator, **options)
        arguments = self.config, case["frequencies"], weights, place
        sizes = {"batch": case["batch"], "capacity": case["capacity"]}
        self.decoder = TorchDecoder(*arguments, **sizes, attention=attention)

    def measure_prefill(self) -> None:
        """Times prefill where it is asked for, and leaves the state after the prompts."""
        decoder, runs = self.decoder, {}

        def prefill(mode: str) -> None:
            decoder.prefill(self.compiled(mode), self.collectives, self.prompts)

        self.worker.together(lambda: prefill(EAGER))
        self.expected = decoder.logits.clone()
        for name, mode in (("torch", EAGER), ("torch_compiled", self.modes[0])):
            if name in self.found and self.case["prefill"]:
                run = functools.partial(prefill, mode)
                try:
                    self.checked(run)
                    runs[name] = run
                except Failure as failure:
                    self.worker.log(f"prefill of {name}: {failure}")
        for name, samples in self.worker.measure(runs, self.case["groups"]).items():
            self.found[name]["prefill"] = samples
        self.worker.together(lambda: prefill(EAGER))
        self.token, self.position = decoder.token.clone(), decoder.position.clone()

    def launches(self) -> dict[str, Run]:
        """The functions that are timed, by candidate."""
        self.rewind()
        self.worker.together(lambda: self.decoder.step(Functions(), self.collectives))
        self.expected = self.decoder.logits.clone()
        fastest = {}
        for name, result in self.found.items():
            modes = (EAGER,) if name == "torch" else self.modes
            try:
                mode, fastest[name] = self.fastest_launch(name, modes)
            except Failure as failure:
                result["failure"] = str(failure)
                continue
            result["options"] = mode
            if name == "torch_compiled":
                self.modes = (mode,)  # Candidates after it do not search again.
        return fastest

    def fastest_launch(self, name: str, modes: Sequence[str]) -> tuple[str, Run]:
        """The fastest mode of the compiler, and its launch; raises Failure if none runs."""
        runs: dict[str, Run] = {}
        failures = []
        for mode in modes:
            try:
                runs[mode] = self.launch(name, mode)
            except Failure as failure:
                failures.append(f"{mode}: {failure}")
                self.worker.log(f"{name}, {failures[-1]}")
        if not runs:
            raise Failure("; ".join(failures))
        if len(runs) == 1:
            return runs.popitem()
        tried = {
            mode: statistics.median(samples) / self.case["launch"]
            for mode, samples in self.worker.measure(runs, TRIAL_GROUPS).items()
        }
        self.found[name]["tried"] |= tried
        fastest = min(tried, key=tried.__getitem__)
        return fastest, runs[fastest]

    def launch(self, name: str, mode: str) -> Run:
        """A function that decodes the tokens after the prompts; raises Failure if it is wrong."""

        def collectives() -> DecoderCollectives:
            if name == "torch_symm_mem":
                return OneShot(self.worker.place.device, self.decoder.zeros)
            return self.collectives

        used = self.worker.together(collectives)

        def token() -> None:
            self.decoder.step(self.compiled(mode), used)

        self.rewind()
        self.worker.together(token)  # Compiles.
        run = self.worker.together(lambda: self.graph_of(token))
        self.rewind()
        self.checked(run)

        def launch() -> None:
            self.rewind()
            for _ in range(self.case["launch"]):
                run()

        return launch

    def rewind(self) -> None:
        """Goes back to the end of the prompts."""
        self.decoder.token.copy_(self.token)
        self.decoder.position.copy_(self.position)

    def checked(self, run: Run) -> None:
        """Runs it; raises Failure if the logits are not the expected ones."""
        self.worker.together(run)
        error = relative_error([self.decoder.logits], [self.expected])
        error = self.worker.largest(math.inf if math.isnan(error) else error)
        if not error < TOLERANCE:
            raise Failure(f"wrong: logits have a relative error of {error:.3g} to eager ones")

    def graph_of(self, run: Run) -> Run:
        return self.worker.captured(run) if self.worker.compiler else run
