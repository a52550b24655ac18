"""The command line of models: import and export of Hugging Face's folders, and generation."""

from __future__ import annotations

import dataclasses
import itertools
import math
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import tyro
from rich.console import Console

from collective_matmul import UnsupportedSiteError
from models.choices import CHOICES
from models.config import LlamaConfig, config_from_json
from models.parameters.adapters import LoraConfig
from models.paths import expanded
from models.simulated_devices import simulate_devices
from models.unsupported_names import sentence_about

Dtype = Literal["bfloat16", "float16", "float32"]
_SMALLEST_SHARD = 1e-6


@dataclass(frozen=True)
class Devices:
    """The devices that hold the model."""

    tensor: int = 0
    """Number of devices that share it; 0: as many of this machine's as divide the model."""
    cpu_devices: int | None = None
    """Number of simulated devices on a machine without GPUs; default: that in XLA_FLAGS, or 1."""


@dataclass(frozen=True)
class GenerateDevices(Devices):
    """The devices that answer."""

    context: int = 1
    """Number of groups of `tensor` devices that a long prompt is divided over."""


@dataclass(frozen=True)
class Import:
    """Make a checkpoint, which the trainer and export read, from a Hugging Face folder."""

    source: Annotated[str, tyro.conf.Positional]
    """Folder with config.json and safetensors files."""
    directory: Annotated[str, tyro.conf.Positional]
    """Directory of the checkpoint, which becomes its step 0."""
    dtype: Dtype = "float32"
    """Dtype of the parameters in the checkpoint; the trainer wants float32."""
    devices: Devices = field(default_factory=Devices)


@dataclass(frozen=True)
class Export:
    """Write a checkpoint's model as a folder that Hugging Face's library loads, or its low-rank
    adapters as one that PEFT loads."""

    checkpoint: Annotated[str, tyro.conf.Positional]
    """A directory of checkpoints, or one step_N in it."""
    directory: Annotated[str, tyro.conf.Positional]
    """The folder to make."""
    adapter: str | None = None
    """Folder of low-rank adapters, as PEFT saves it, to merge into the weights."""
    dtype: Dtype | None = None
    """Dtype of the tensors; default: that in which they were imported, or else float32."""
    max_shard_gigabytes: float = 2.0
    """Size of a file, in 10^9 bytes, from which on there is another one."""
    devices: Devices = field(default_factory=Devices)


#: Values of a flag that takes several, and may itself be given several times.
_Repeatable = Annotated[tuple[tuple[str, ...], ...], tyro.conf.UseAppendAction]


@dataclass(frozen=True)
class Generate:
    """Answer prompts with a model in a Hugging Face folder."""

    source: Annotated[str, tyro.conf.Positional]
    """Folder with config.json, safetensors files and tokenizer.json."""
    prompt: _Repeatable = ()
    """One or several prompts. The answer to one is printed as it comes."""
    adapter: _Repeatable = ()
    """Folders of low-rank adapters, as PEFT saves them, each FOLDER or NAME=FOLDER. They are not
    merged. With several, each answers under its name."""
    chat: bool = False
    """Prompts are messages of a user, written by the tokenizer's chat template."""
    chat_template_kwargs: str = "{}"
    """Variables of the chat template as a JSON object, such as '{"enable_thinking": false}'."""
    max_new_tokens: int = 256
    """Largest number of tokens of an answer."""
    temperature: float = 0.0
    """Divides the logits before a token is drawn; 0 takes the likeliest token."""
    top_k: int = 0
    """Number of likeliest tokens that are drawn from; 0: all."""
    top_p: float = 1.0
    """The fewest likeliest tokens whose probabilities add up to it are drawn from."""
    seed: int = 0
    """Random seed of drawn tokens."""
    tokens_per_launch: int = 16
    """Tokens that one program computes, with several prompts."""
    implementation: str | None = None
    """Backend of the collective matmuls, or several separated by commas; default: chosen for each
    shape."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Dtype of parameters and of the computation."""
    devices: GenerateDevices = field(default_factory=GenerateDevices)


Command = (
    Annotated[Import, tyro.conf.subcommand("import")]
    | Annotated[Export, tyro.conf.subcommand("export")]
    | Annotated[Generate, tyro.conf.subcommand("generate")]
)


def main(arguments: Sequence[str]) -> None:
    """Runs ``python -m models`` with these arguments. Reports invalid input in one sentence."""
    program, given = "python -m models", list(arguments)
    command: Any = tyro.cli(Command, args=given, prog=program, registry=CHOICES)
    runs: dict[type, Callable[[Any], None]] = {
        Import: run_import,
        Export: run_export,
        Generate: run_generate,
    }
    try:
        simulate_devices("devices.cpu_devices", command.devices.cpu_devices, default=1)
        runs[type(command)](command)
    except (ValueError, ImportError, OSError) as error:
        Console(stderr=True).print(
            f"error: {_sentence(error)}", style="red", highlight=False, soft_wrap=True, markup=False
        )
        raise SystemExit(2) from error


def _sentence(error: Exception) -> str:
    """Describes an error; one of the operating system's with the file first, and one about a
    backend with its flag."""
    if isinstance(error, UnsupportedSiteError):
        return sentence_about(error, "implementation", ",".join(error.requested), "leave it out")
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}; give a path that can be read or written"
    return str(error)


def run_import(command: Import) -> None:
    """Reads a folder and writes ``step_0``."""
    from models.checkpoint.orbax_manager import save_params
    from models.generation import Generator
    from models.hugging_face import ModelFolder, load
    from models.hugging_face.files import real_path
    from models.hugging_face.writing import check_empty, keep_origin

    folder = ModelFolder(command.source)
    target = real_path(command.directory)
    check_empty(target)
    model = Generator(
        folder.config, mesh=_mesh(folder.config, command.devices), dtype=command.dtype
    )
    params = load(folder, model.abstract_params)
    save_params(target, params, {"model": dataclasses.asdict(model.config)})
    keep_origin(folder.path, target)
    print(f"{target}: step_0 of {folder.path}, in {command.dtype}")


def run_export(command: Export) -> None:
    """Reads the parameters of a checkpoint and writes a folder."""
    from models.checkpoint.saved_checkpoint import find_checkpoint
    from models.generation import Generator
    from models.hugging_face import AdapterFolder, MergedParams, write
    from models.hugging_face.run_tokenizer import origin_of_run
    from models.hugging_face.writing import check_empty

    if not _SMALLEST_SHARD <= command.max_shard_gigabytes < math.inf:
        raise ValueError(
            f"max_shard_gigabytes={command.max_shard_gigabytes}: expected a number from"
            f" {_SMALLEST_SHARD:g}"
        )
    check_empty(expanded(command.directory))
    try:
        saved = find_checkpoint(command.checkpoint)
    except ValueError:
        _check_no_folder(command)
        raise
    config = config_from_json(saved.configuration()["model"])
    # A vocabulary that was saved cannot be padded any more.
    if config.padded_vocabulary_size is None:
        config = dataclasses.replace(config, padded_vocabulary_size=config.vocabulary_size)
    lora = LoraConfig(**saved.configuration().get("lora", {}))
    if lora.rank is not None:
        _export_adapter(command, saved, config, lora)
        return
    adapter = None if command.adapter is None else AdapterFolder(command.adapter, config)
    mesh = _mesh(config, command.devices)
    model = Generator(config, mesh=mesh, dtype=saved.params_dtype())
    params = saved.restore_params(model.abstract_params)
    if adapter is not None:
        params = MergedParams(params, adapter)
    limit = int(command.max_shard_gigabytes * 1e9)
    with origin_of_run(saved.path.parent, saved.configuration()) as origin:
        options: Any = {"origin": origin, "dtype": command.dtype, "max_shard_bytes": limit}
        write(command.directory, _with_context(config, saved, origin), params, **options)
    print(f"{command.directory}: {saved.path}")
    _print_next_steps(command.directory, chat=saved.configuration().get("chat", False))


def _with_context(config: LlamaConfig, saved: Any, origin: Path | None) -> LlamaConfig:
    """The shape of a model, whose context is the length of the sequences of its run if it came with
    no config.json and nobody said what it is."""
    from models.hugging_face import ModelFolder

    is_known = config.context_length is not None or (
        origin is not None and ModelFolder.is_one(origin)
    )
    length = None if is_known else saved.configuration().get("sequence_length")
    return config if length is None else dataclasses.replace(config, context_length=length)


def _check_no_folder(command: Export) -> None:
    """Raises ValueError, with the commands to give instead, for a Hugging Face folder."""
    from models.hugging_face import ModelFolder

    if not ModelFolder.is_one(command.checkpoint):
        return
    adapter = [] if command.adapter is None else ["--adapter", command.adapter]
    make = shlex.join(["python", "-m", "models", "import", command.checkpoint])
    export = shlex.join([command.directory, *adapter])
    raise ValueError(
        f"checkpoint={command.checkpoint!r}: a Hugging Face folder, and not a checkpoint; make one"
        f" with `{make} CHECKPOINT`, and export that: `python -m models export CHECKPOINT {export}`"
    )


def _export_adapter(command: Export, saved: Any, config: LlamaConfig, lora: LoraConfig) -> None:
    """Writes the adapters of a checkpoint, which has no others of the model's parameters."""
    from models.hugging_face import ModelFolder, export_adapter
    from models.hugging_face.files import real_path

    if command.adapter is not None:
        raise ValueError(
            f"adapter={command.adapter!r}: {saved.path} has adapters and not the weights to merge"
            " them into; export it without --adapter, and then its base with that folder"
        )
    base: str | None = saved.configuration().get("init_from")
    restore = saved.restore_params
    options: Any = {"base_model": base, "dtype": command.dtype}
    export_adapter(command.directory, config, lora, restore, **options)
    print(f"{command.directory}: adapters of {saved.path}")
    base = base if base is not None and ModelFolder.is_one(real_path(base)) else "BASE"
    _print_next_steps(command.directory, base, chat=saved.configuration().get("chat", False))


def _print_next_steps(folder: str, base: str | None = None, *, chat: bool) -> None:
    """Prints what can be done with an exported folder.

    Args:
      folder: the model's, or of adapters.
      base: the folder of the weights beside which adapters were trained; None: it has a model.
      chat: the model was trained on conversations.
    """
    adapter = [] if base is None else ["--adapter", folder]
    command = ["python", "-m", "models", "generate", base or folder, *adapter]
    command += [*["--chat"] * chat, "--prompt", "TEXT"]
    if base is not None or (expanded(folder) / "tokenizer.json").is_file():
        print(f"to answer prompts: {shlex.join(command)}")
    load = f"transformers.AutoModelForCausalLM.from_pretrained({base or folder!r})"
    if base is not None:
        load = f"peft.PeftModel.from_pretrained({load}, {folder!r})"
    print(f"to load in PyTorch: {load}")


def _in_one(given: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """The values of a flag that was given several times, in their order."""
    return tuple(itertools.chain(*given))


def run_generate(command: Generate) -> None:
    """Reads a folder and answers prompts."""
    from models.generation import Generator, Sampling
    from models.generation.adapter_params import adapters_in_common
    from models.generation.text import answer
    from models.hugging_face import ModelFolder, load
    from models.hugging_face.chat.template import read_variables

    prompts = _in_one(command.prompt)
    if not prompts:
        raise ValueError("prompt: expected at least one; give --prompt TEXT, or several")
    chat_variables = read_variables(command.chat_template_kwargs)
    if chat_variables and not command.chat:
        raise ValueError(
            f"chat_template_kwargs={command.chat_template_kwargs!r}: expected chat too; add --chat,"
            " or leave this out"
        )
    sampling = Sampling(command.temperature, command.top_k, command.top_p, command.seed)
    _check_no_checkpoint(command.source)
    folder = ModelFolder(command.source)
    # Read before anything is compiled.
    folder.tokenizer()
    _ = folder.stop_tokens
    names = command.implementation and tuple(command.implementation.split(","))
    adapters = _named_adapters(_in_one(command.adapter), folder.config)
    generator = Generator(
        folder.config,
        mesh=_mesh(folder.config, command.devices, command.devices.context),
        implementation=names,
        dtype=command.dtype,
        lora=adapters_in_common(adapters.values()),
    )
    params = load(folder, generator.base_params)
    for name, adapter in (adapters or {"": None}).items():
        if len(adapters) > 1:
            print(f"{name}:", flush=True)
        answer(
            generator,
            params if adapter is None else params | generator.adapter_params(adapter),
            folder,
            prompts,
            sys.stdout,
            chat=command.chat,
            chat_variables=chat_variables,
            max_new_tokens=command.max_new_tokens,
            sampling=sampling,
            tokens_per_launch=command.tokens_per_launch,
        )


def _check_no_checkpoint(source: str) -> None:
    """Raises ValueError, with the commands to give instead, for a checkpoint of the trainer."""
    from models.checkpoint.saved_checkpoint import find_checkpoint
    from models.hugging_face import ModelFolder

    if ModelFolder.is_one(source):
        return
    try:
        saved = find_checkpoint(source).configuration()
    except ValueError:
        return  # Nor is it a checkpoint.
    export = shlex.join(["python", "-m", "models", "export", source])
    generate = "python -m models generate FOLDER"
    if LoraConfig(**saved.get("lora", {})).rank is not None:
        base = shlex.quote(saved.get("init_from") or "BASE")
        generate = f"python -m models generate {base} --adapter FOLDER"
    raise ValueError(
        f"source={source!r}: a checkpoint of the trainer, and not a Hugging Face folder; make one"
        f" with `{export} FOLDER`, and answer with `{generate}`"
    )


def _named_adapters(values: Sequence[str], config: LlamaConfig) -> dict[str, Any]:
    """The folders of adapters by name.

    Raises:
      ValueError: two have one name; or a folder cannot be used.
    """
    from models.hugging_face import AdapterFolder

    found: dict[str, AdapterFolder] = {}
    for value in values:
        name, equals, path = value.partition("=")
        if not equals or "/" in name:  # A path may have the sign.
            name, path = Path(value).name, value
        if name in found:
            raise ValueError(
                f"adapter={value!r}: another one is named {name!r}; give NAME=FOLDER with a name"
                " of its own"
            )
        found[name] = AdapterFolder(path, config)
    return found


def _mesh(config: LlamaConfig, devices: Devices, context: int = 1) -> jax.sharding.Mesh:
    """A mesh of the devices asked for, or of the most that the model can be sharded over."""
    from models.generation.generator import make_mesh, most_devices

    count = jax.device_count()
    if not 0 <= devices.tensor <= count:
        raise ValueError(
            f"devices.tensor={devices.tensor}: expected at most {count}, the number of devices"
            f" here, or 0{_how_to_simulate(devices.tensor)}"
        )
    least = max(devices.tensor, 1)
    if not 1 <= context <= count // least:
        raise ValueError(
            f"devices.context={context}: expected 1 to {count // least}, as the number of devices"
            f" here is {count}, and devices.tensor={devices.tensor}"
            f"{_how_to_simulate(context * least)}"
        )
    return make_mesh(devices.tensor or most_devices(config, context), context)


def _how_to_simulate(devices: int) -> str:
    """The end of a sentence that asks for this number of devices; "" where none are simulated."""
    if jax.default_backend() != "cpu" or devices <= jax.device_count():
        return ""
    return f"; on a CPU, --devices.cpu-devices {devices} simulates {devices}"
