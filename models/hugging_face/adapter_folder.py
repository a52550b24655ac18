"""Folders of low-rank adapters, as the library PEFT writes them, and models merged with them.

PEFT stores ``lora_A.weight`` [rank, in] and ``lora_B.weight`` [out, rank]. The parameters of a
model here are ``lora_a`` [in, rank] and ``lora_b`` [rank, out], the transposes. Dimensions that a
kernel splits, such as heads, are flattened in both.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from models.config import LlamaConfig
from models.families.config_keys import shown_name
from models.hugging_face.files import find_file, read_json, real_path, reason
from models.hugging_face.peft_config import (
    PeftConfig,
    peft_config_of,
    read_peft_config,
    write_peft_config,
)
from models.hugging_face.tensor_names import Tensor, tensors
from models.hugging_face.writing import check_empty, save_tensors
from models.parameters.adapters import LORA_A, LORA_B, MODULES, LoraConfig

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_KERNEL, _WEIGHT = "kernel", ".weight"
_SHOWN = 5


class AdapterFolder:
    """The adapters of a folder of PEFT's, read and checked against a model.

    Attributes:
      config: what adapter_config.json says.
      params: float arrays in the dtype of the file, by names such as
        ``layers.0.attention.output.lora_a``: of `lora_a` [in, rank], of `lora_b` [rank, out].
      scales: the factor of each adapter's product, by the name of its kernel.

    Args:
      path: the folder.
      model: shape of the model that the adapters are for.

    Raises:
      ValueError: a file is missing, damaged or outside the folder; the adapters are of a kind that
        is not supported; or tensors are missing, not expected or of another shape.
      ImportError: the package safetensors is not installed.
    """

    def __init__(self, path: str | Path, model: LlamaConfig):
        self.path = real_path(path)
        try:
            values = read_json(self.path, ADAPTER_CONFIG)
            if values is None:
                raise ValueError(f"has no {ADAPTER_CONFIG}; give a folder as PEFT saves it")
            self.config = read_peft_config(values)
            stored = _read_tensors(self.path)
            self.scales: dict[str, float] = {}
            self.params: dict[str, np.ndarray] = {}
            for kernel, tensor in _adapted(model, self.config):
                self._take(kernel, tensor, stored)
            _check_rest(stored)
        except ValueError as error:
            raise ValueError(f"{self.path}: {error}") from error

    def _take(self, kernel: str, tensor: Tensor, stored: dict[str, np.ndarray]) -> None:
        """Moves an adapter from the tensors of the file to the parameters."""
        module = _module(tensor)
        rank, (out, into) = self.config.rank_of(module), tensor.shape
        shapes = {"lora_A": (rank, into), "lora_B": (out, rank)}
        for (kind, shape), end in zip(shapes.items(), (LORA_A, LORA_B), strict=True):
            name = _key(module, kind)
            if name not in stored:
                raise ValueError(f"{ADAPTER_WEIGHTS}: has no {name}, which {ADAPTER_CONFIG} names")
            values = stored.pop(name)
            if values.shape != shape:
                raise ValueError(
                    f"{name}: of shape {list(values.shape)}; expected {list(shape)} for this model"
                )
            self.params[kernel.removesuffix(_KERNEL) + end] = values.T
        self.scales[kernel] = self.config.scale_of(module)


class MergedParams(Mapping[str, jax.Array]):
    """A model's parameters with adapters added, each computed when it is asked for.

    A kernel with an adapter is ``W + scale A B`` in float32; `write` rounds it once, to the
    dtype of the file. Every other parameter is the base's.

    Args:
      base: global arrays by name, of each layer.
      adapter: the adapters, of the same model.
    """

    def __init__(self, base: Mapping[str, jax.Array], adapter: AdapterFolder):
        self._base, self._adapter = base, adapter

    def __getitem__(self, name: str) -> jax.Array:
        kernel = self._base[name]
        scale = self._adapter.scales.get(name)
        if scale is None:
            return kernel
        path = name.removesuffix(_KERNEL)
        a, b = (self._adapter.params[path + end].astype(np.float32) for end in (LORA_A, LORA_B))
        merged = _merge(kernel, a, b, np.float32(scale))
        return jax.device_put(merged, kernel.sharding)

    def __iter__(self) -> Iterator[str]:
        return iter(self._base)

    def __len__(self) -> int:
        return len(self._base)


@jax.jit
def _merge(kernel: jax.Array, a: Any, b: Any, scale: Any) -> jax.Array:
    product = jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)
    return kernel.astype(jnp.float32) + scale * product.reshape(kernel.shape)


def write_adapter(
    directory: str | Path,
    model: LlamaConfig,
    config: PeftConfig,
    params: Mapping[str, Any],
) -> None:
    """Writes adapters as PEFT does. The folder gets its name when it is whole.

    Args:
      directory: the folder to make. There may be an empty one.
      model: shape of the model.
      config: the adapters.
      params: `lora_a` [in, rank] and `lora_b` [rank, out] by name, of each layer, on the host or
        addressable devices.

    Raises:
      ValueError: the folder has something in it; or a parameter is missing, is of another shape
        than the configuration says, or is not one of its adapters.
    """
    target = real_path(directory)
    check_empty(target)
    contents, used = {}, set()
    for kernel, tensor in _adapted(model, config):
        module = _module(tensor)
        rank, (out, into) = config.rank_of(module), tensor.shape
        for kind, end, shape in (
            ("lora_A", LORA_A, (into, rank)),
            ("lora_B", LORA_B, (rank, out)),
        ):
            name = kernel.removesuffix(_KERNEL) + end
            if name not in params or params[name].shape != shape:
                found = list(params[name].shape) if name in params else "nothing"
                raise ValueError(f"{name}: expected an array {list(shape)}; found {found}")
            contents[_key(module, kind)] = np.ascontiguousarray(np.asarray(params[name]).T)
            used.add(name)
    extra = sorted(set(params) - used)
    if extra:
        raise ValueError(f"{extra[0]}: is no adapter that the configuration describes")
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    # Not sorted: of patterns that overlap, the first is used.
    text = json.dumps(write_peft_config(config), indent=2) + "\n"
    (partial / ADAPTER_CONFIG).write_text(text, encoding="utf-8")
    save_tensors(contents, partial / ADAPTER_WEIGHTS)
    if target.is_dir():
        target.rmdir()
    os.replace(partial, target)


def export_adapter(
    directory: str | Path,
    model: LlamaConfig,
    lora: LoraConfig,
    restore: Callable[[dict[str, jax.ShapeDtypeStruct]], Mapping[str, jax.Array]],
    *,
    base_model: str | None = None,
    dtype: str | None = None,
) -> None:
    """Writes adapters of the trainer as PEFT does.

    Args:
      directory: the folder to make.
      model: shape of the model.
      lora: its adapters.
      restore: reads them, float32, on one device.
      base_model: the weights beside which they were trained.
      dtype: dtype of the tensors; None: float32.

    Raises:
      ValueError: parameters were trained whole beside them; or as `write_adapter`.
    """
    config = peft_config_of(lora, base_model)
    mesh = jax.sharding.Mesh(jax.local_devices()[:1], ("device",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    abstract: dict[str, jax.ShapeDtypeStruct] = {}
    for kernel, tensor in _adapted(model, config):
        rank, (out, into) = config.rank_of(_module(tensor)), tensor.shape
        for end, shape in ((LORA_A, (into, rank)), (LORA_B, (rank, out))):
            name = kernel.removesuffix(_KERNEL) + end
            abstract[name] = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)
    params = {name: leaf.astype(dtype or "float32") for name, leaf in restore(abstract).items()}
    write_adapter(directory, model, config, params)


def _adapted(model: LlamaConfig, config: PeftConfig) -> Iterator[tuple[str, Tensor]]:
    """The kernels with adapters, and their tensors."""
    linear = [
        (path, tensor)
        for path, tensor in tensors(model)
        if path.endswith(f".{_KERNEL}") and path != "head.kernel"
    ]
    if model.num_experts is not None:
        raise ValueError("adapters of models with experts are not supported; merge them with PEFT")
    found = [(path, tensor) for path, tensor in linear if config.adapts(_module(tensor))]
    if not found:
        raise ValueError(
            f"target_modules={config.target_modules!r}: no module of this model; expected some of"
            f" {', '.join(MODULES)}"
        )
    yield from found


def _module(tensor: Tensor) -> str:
    return tensor.name.removesuffix(_WEIGHT)


def _key(module: str, kind: str) -> str:
    return f"{_PREFIX}{module}.{kind}{_WEIGHT}"


def _read_tensors(folder: Path) -> dict[str, np.ndarray]:
    path = find_file(folder, ADAPTER_WEIGHTS)
    if path is None:
        raise ValueError(f"has no {ADAPTER_WEIGHTS}; save the adapter with safetensors")
    try:
        from safetensors.numpy import load_file
    except ImportError as error:
        raise ImportError(
            f"{folder}: reading it needs the package safetensors;"
            " pip install '.[hf]' in the repository"
        ) from error
    try:
        return load_file(path)
    except Exception as error:
        raise ValueError(
            f"{ADAPTER_WEIGHTS} is not a whole safetensors file ({reason(error)})"
        ) from error


def _check_rest(stored: Mapping[str, Any]) -> None:
    """Raises ValueError for tensors of the file that are no adapter of the model's."""
    if stored:
        names = ", ".join(shown_name(re.sub(r"\s", "?", name)) for name in sorted(stored)[:_SHOWN])
        raise ValueError(
            f"{ADAPTER_WEIGHTS}: {len(stored)} tensors are no adapters that {ADAPTER_CONFIG}"
            f" describes (adapters of the embedding or the head are not supported): {names}"
        )
