"""Answers to batches of prompts, over the devices of a tensor axis, and of a context axis."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from collective_matmul import overlap_jit, zigzag_order
from models.config import LlamaConfig
from models.generation import decoder
from models.generation.adapter_params import AdapterParams, adapter_params
from models.generation.cache import choose_attention
from models.generation.decoder import Caches
from models.generation.sampling import Sampling, choose
from models.llama import Llama
from models.log import warn_once
from models.parameters.adapters import LoraConfig, Training, is_adapter

Params = dict[str, jax.Array]
#: What a launch of decoding goes on from: tokens, their places, whether sequences have ended.
Ends = tuple[jax.Array, jax.Array, jax.Array]

AXIS, CONTEXT = "tensor", "context"
LIKELIEST = Sampling()
CACHE_SPEC = P(None, AXIS)
#: A token passes through no ring of chunks, for which `overlap_jit` keeps XLA from merging matmuls.
#: Merged, queries, keys and values are one kernel, and gate and up another; no weight is copied.
_DECODE_OPTIONS = {"xla_gpu_dot_merger_threshold_mb": str(2**20)}
#: Lengths of prompts are padded to this times a power of two, so that few programs are compiled.
_SHORTEST = 128
#: Places are int32.
_MOST_TOKENS = 2**31 - 1


class Generator:
    """A model that answers prompts. Programs are compiled for each padded length and batch.

    Attributes:
      config: shape of the model.
      mesh: its mesh, with an axis "tensor", and maybe an axis "context".
      abstract_params: global shapes, dtypes and shardings of the parameters by name.

    Args:
      config: shape of the model.
      mesh: a mesh with an axis "tensor", and maybe an axis "context", over which prompts are
        divided; answers are computed on each of its tensor groups alike. None: a tensor axis of as
        many devices as the model can be sharded over.
      implementation: which backends execute the collective matmuls, as the layers take it.
      dtype: dtype of parameters and of the computation.
      cache_attention: what computes attention of a token to the ones before it: "triton", a kernel
        for NVIDIA GPUs that reads the valid part of caches; "xla", matmuls that read all of them;
        None: the kernel on Hopper GPUs, unless it cannot compute the model's attention.
      lora: adapters that the model has room for: see `adapters_in_common`. None: there are none.
      jit: what compiles the programs, with arguments of `jax.jit`. Plain `jax.jit` is for
        comparisons.

    Raises:
      ValueError: for a model that the axis does not fit, a mesh of other axes, or a kernel that
        cannot run.
    """

    def __init__(
        self,
        config: LlamaConfig,
        *,
        mesh: Mesh | None = None,
        implementation: str | Sequence[str] | None = None,
        dtype: jax.typing.DTypeLike = jnp.bfloat16,
        cache_attention: str | None = None,
        lora: LoraConfig | None = None,
        jit: Callable = overlap_jit,
    ):
        self._jit = jit
        self.mesh = make_mesh(most_devices(config)) if mesh is None else mesh
        if AXIS not in self.mesh.shape or not {*self.mesh.shape} <= {AXIS, CONTEXT}:
            raise ValueError(
                f"mesh: has axes {tuple(self.mesh.shape)}; expected {AXIS!r}, and maybe"
                f" {CONTEXT!r}: models.generation.generator.make_mesh makes such a mesh"
            )
        size, self._context = self.mesh.shape[AXIS], self.mesh.shape.get(CONTEXT, 1)
        self.config = config.padded_for(size)
        self.config.check_tensor_axis(size)
        self._cache_attention = choose_attention(
            config, dtype, self.mesh.devices.flat[0], cache_attention
        )

        def build() -> Llama:
            return Llama(
                self.config,
                implementation=implementation,
                dtype=dtype,
                key_value_copies=config.key_value_copies(size),
                training=None if lora is None else Training(lora),
                context_axis_name=CONTEXT if self._context > 1 else None,
                rngs=nnx.Rngs(0),
            )

        self._graph, abstract = nnx.split(nnx.eval_shape(build))
        self._variables = {
            ".".join(map(str, path)): (path, leaf) for path, leaf in nnx.to_flat_state(abstract)
        }
        specs = nnx.to_flat_state(nnx.get_partition_spec(abstract))
        self._specs = {".".join(map(str, path)): spec.get_value() for path, spec in specs}
        self.abstract_params = {
            name: jax.ShapeDtypeStruct(
                leaf.shape, dtype, sharding=NamedSharding(self.mesh, self._specs[name])
            )
            for name, (_, leaf) in self._variables.items()
        }

    @property
    def base_params(self) -> dict[str, jax.ShapeDtypeStruct]:
        """`abstract_params` without those of adapters."""
        params = self.abstract_params.items()
        return {name: leaf for name, leaf in params if not is_adapter(name)}

    def adapter_params(self, adapter: AdapterParams) -> Params:
        """The parameters of adapters, to be given beside those of the base."""
        return adapter_params(adapter, self.abstract_params)

    def __call__(
        self,
        params: Mapping[str, jax.Array],
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int = 256,
        sampling: Sampling = LIKELIEST,
        stop_tokens: Sequence[int] = (),
        tokens_per_launch: int = 16,
        on_token: Callable[[int, int], object] | None = None,
    ) -> list[list[int]]:
        """The tokens that follow each prompt, without the stop token.

        Args:
          params: the parameters, as `abstract_params` describes them.
          prompts: the tokens of each prompt.
          max_new_tokens: largest number of tokens of an answer. It ends with the context of the
            model too.
          sampling: how tokens are chosen.
          stop_tokens: tokens that end an answer.
          tokens_per_launch: tokens that one program computes before the host sees them.
          on_token: called with the number of the prompt and each token of its answer, in order.

        Raises:
          ValueError: for an empty prompt, or one that leaves no room in the context of the model.
        """
        check_prompts(prompts, self.config)
        for name, value in (
            ("max_new_tokens", max_new_tokens),
            ("tokens_per_launch", tokens_per_launch),
        ):
            if value < 1:
                raise ValueError(f"{name}={value}: expected at least 1")
        answers = _Answers(prompts, max_new_tokens, self.config.context_length, on_token)
        lengths = np.array([len(prompt) for prompt in prompts], np.int32)
        tokens = self._padded(prompts)
        unit = self._unit
        tokens_per_launch = min(tokens_per_launch, _rounded_up(answers.longest, unit))
        launches = -(-(answers.longest - 1) // tokens_per_launch)
        capacity = max(tokens.shape[1], int(lengths.max()) + 1 + launches * tokens_per_launch)
        capacity = _rounded_up(capacity, unit)
        if capacity > _MOST_TOKENS:
            raise ValueError(
                f"max_new_tokens={max_new_tokens}: expected less; the cache has place for at most"
                f" {_MOST_TOKENS} tokens of a prompt and its answer"
            )
        # Others are never chosen, and int32 may not hold them.
        stop = tuple(t for t in stop_tokens if 0 <= t < self.config.vocabulary_size)
        settings = sampling, stop
        with jax.set_mesh(self.mesh):
            order = zigzag_order(tokens.shape[1], self._context)
            prefill = self.prefill(capacity, *settings)
            first, ends, caches = prefill(params, tokens[:, order], lengths)
            waiting = first[None]
            launch = self.decode(tokens_per_launch, *settings)
            # The next launch runs while the host reads the tokens of the last one.
            for _ in range(launches):
                if answers.all_ended:
                    break
                new, ends, caches = launch(params, ends, caches)
                answers.take(np.asarray(waiting), stop)
                waiting = new
            answers.take(np.asarray(waiting), stop)
        if answers.cut:
            warn_once(
                f"max_new_tokens={max_new_tokens}: {answers.cut} of {len(prompts)} answers end"
                f" before, with the model's context of {self.config.context_length} tokens, prompt"
                " included; shorten the prompt"
            )
        return answers.tokens

    @property
    def _unit(self) -> int:
        """The unit of padded lengths: devices have two chunks, and tensor devices equal rows."""
        return math.lcm(_SHORTEST, self._context * math.lcm(2, self.mesh.shape[AXIS]))

    def _padded(self, prompts: Sequence[Sequence[int]]) -> np.ndarray:
        """Prompts of one padded length: int32 [B, S]."""
        longest = max(map(len, prompts))
        unit = self._unit
        length = unit * 2 ** max(math.ceil(math.log2(longest / unit)), 0)
        tokens = np.zeros((len(prompts), length), np.int32)
        for row, prompt in zip(tokens, prompts, strict=True):
            row[: len(prompt)] = prompt
        return tokens

    def model(self, params: Mapping[str, jax.Array]) -> Llama:
        """The model with these parameters, global or local."""
        state = [
            (path, leaf.replace(params[name])) for name, (path, leaf) in self._variables.items()
        ]
        return nnx.merge(self._graph, nnx.from_flat_state(state))

    @functools.cache  # noqa: B019, a generator lives as long as its programs
    def prefill(self, capacity: int, sampling: Sampling, stop: tuple[int, ...]) -> Any:
        """The program of prompts: parameters, tokens in zigzag order over the context axis, and
        lengths -> first tokens, ends, caches."""

        def local(params: Params, tokens: jax.Array, lengths: jax.Array):
            logits, caches = decoder.prefill(self.model(params), tokens, lengths, capacity)
            first = self._choose(logits, lengths, sampling)
            return first, (first, lengths, _is_any_of(first, stop)), caches

        divided = self._context > 1
        part = P(None, CONTEXT) if divided else P()
        # Caches are gathered over the context axis, which their types do not show.
        options = {"check_vma": not divided}
        return self._jitted(local, (self._specs, part, P()), (P(), P(), CACHE_SPEC), options)

    @functools.cache  # noqa: B019
    def decode(self, count: int, sampling: Sampling, stop: tuple[int, ...]) -> Any:
        """The program of `count` tokens: parameters, ends and caches -> int32 [count, B], ends,
        caches."""

        def local(params: Params, ends: Ends, caches: Caches):
            model = self.model(params)

            def step(carry: tuple[Ends, Caches], _: None):
                (tokens, places, ended), caches = carry
                logits, caches = decoder.decode(
                    model, tokens, places, caches, self._cache_attention
                )
                chosen = self._choose(logits, places + 1, sampling)
                tokens = jnp.where(ended, tokens, chosen)
                ended |= _is_any_of(tokens, stop)
                return ((tokens, places + 1, ended), caches), tokens

            (ends, caches), tokens = jax.lax.scan(step, (ends, caches), length=count)
            return tokens, ends, caches

        in_specs, out_specs = (self._specs, P(), CACHE_SPEC), (P(), P(), CACHE_SPEC)
        options = {"donate_argnums": (2,), "compiler_options": _DECODE_OPTIONS}
        return self._jitted(local, in_specs, out_specs, {}, **options)

    def _choose(self, logits: jax.Array, places: jax.Array, sampling: Sampling) -> jax.Array:
        size = self.config.vocabulary_size
        return choose(logits, places, sampling, vocabulary_size=size, axis_name=AXIS)

    def _jitted(
        self, local: Callable, in_specs: Any, out_specs: Any, checks: Any, **options: Any
    ) -> Any:
        specs = {"in_specs": in_specs, "out_specs": out_specs}
        mapped = jax.shard_map(local, mesh=self.mesh, **specs, **checks)
        return self._jit(mapped, **options)


class _Answers:
    """The tokens so far. It ends an answer at a stop token, or when it is as long as may be."""

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        context_length: int | None,
        on_token: Callable[[int, int], object] | None,
    ):
        self.tokens: list[list[int]] = [[] for _ in prompts]
        context = context_length or math.inf
        self._most = max_new_tokens
        self._room = [int(min(max_new_tokens, context - len(prompt))) for prompt in prompts]
        self._ended = [False] * len(prompts)
        self._on_token = on_token

    @property
    def longest(self) -> int:
        return max(self._room)

    @property
    def cut(self) -> int:
        """The number of answers that ended with the context of the model."""
        full = zip(self.tokens, self._room, strict=True)
        return sum(len(tokens) == room < self._most for tokens, room in full)

    @property
    def all_ended(self) -> bool:
        return all(self._ended)

    def take(self, tokens: np.ndarray, stop_tokens: tuple[int, ...]) -> None:
        """Adds int32 [count, B]."""
        for row in tokens:
            for number, token in enumerate(map(int, row)):
                if self._ended[number] or token in stop_tokens:
                    self._ended[number] = True
                    continue
                self.tokens[number].append(token)
                self._ended[number] = len(self.tokens[number]) >= self._room[number]
                if self._on_token is not None:
                    self._on_token(number, token)


def make_mesh(tensor: int, context: int = 1) -> Mesh:
    """A mesh of an axis "tensor", and of an axis "context" of more than one device, over the first
    devices."""
    sizes = {AXIS: tensor} if context == 1 else {CONTEXT: context, AXIS: tensor}
    types = (AxisType.Auto,) * len(sizes)
    devices = jax.devices()[: tensor * context]
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=types, devices=devices)


def most_devices(config: LlamaConfig, context: int = 1) -> int:
    """The largest tensor axis that fits a model and this machine, beside a context axis."""
    return max(filter(config.fits_tensor_axis, range(1, jax.device_count() // context + 1)))


def check_prompts(prompts: Sequence[Sequence[int]], config: LlamaConfig) -> None:
    """Raises ValueError unless prompts have tokens, of the vocabulary, and leave room for more."""
    if not prompts:
        raise ValueError("prompts: expected at least one")
    for number, prompt in enumerate(prompts):
        if not len(prompt):
            raise ValueError(f"prompts: number {number} has no tokens; expected at least one")
        if max(prompt) >= config.vocabulary_size or min(prompt) < 0:
            raise ValueError(
                f"prompts: number {number} has a token outside of the vocabulary of"
                f" {config.vocabulary_size}; encode it with the model's own tokenizer"
            )
        if config.context_length is not None and len(prompt) >= config.context_length:
            raise ValueError(
                f"prompts: number {number} has {len(prompt)} tokens, and the model's context is of"
                f" {config.context_length}, answer included; shorten the prompt"
            )


def _rounded_up(count: int, unit: int) -> int:
    return -(-count // unit) * unit


def _is_any_of(tokens: jax.Array, values: tuple[int, ...]) -> jax.Array:
    """bool [B]."""
    if not values:
        return jnp.zeros_like(tokens, bool)
    return jnp.any(tokens[:, None] == jnp.array(values, tokens.dtype)[None], axis=1)
