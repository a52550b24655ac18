"""``python -m train --plan``: the table, what does not fit, and the command of the best."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence
from typing import Any

import jax
from rich.console import Console

from collective_matmul import AttentionDecision
from models.parameters.adapters import Training
from train.config.checks import check_planned_machine, check_trained, warnings_of
from train.config.config import Config, MeshConfig, MeshSizes
from train.config.counts import counted
from train.config.defaults import describe_preset, describe_taken
from train.config.model_folder import DEFAULT_PRESET, model_folder, model_name
from train.memory.device_memory import GPUS, MARGIN, memory_limit
from train.parallel.mesh import make_abstract_mesh
from train.plan.candidates import (
    Candidate,
    Machine,
    Plan,
    choices,
    is_free,
    make_plan,
    planned_batch_size,
    unfit_mesh,
)
from train.plan.rates import RATES
from train.plan.rings import GPUS_OF_A_NODE
from train.plan.run import attention_decision
from train.plan.step_time import BY_PART, milliseconds, unpredicted_reason
from train.plan.traced_rows import TOO_LOW_WITH_EXPERTS, is_near, trace_first
from train.plan.what_fits import ways_to_fit

_ROWS, _ROWS_IN_8_BITS, _REASONS = 10, 3, 6
#: How far predicted step times have been off; docs/how_to/plan.md has them.
_ERROR = 0.05
#: Flags that a plan chooses, and those that ask for one: what its command does not repeat.
CHOSEN = (
    "--mesh.", "--zero", "--remat", "--scan-layers", "--gradient-accumulation-steps",
    "--batch-size", "--expert-axes", "--plan", "--device", "--devices", "--plan-network",
)  # fmt: skip


def print_plan(config: Config, arguments: Sequence[str], console: Console) -> bool:
    """Prints what a configuration may run with on the machine that it names.

    Returns whether something fits.

    Args:
      config: the configuration, with the model that it says.
      arguments: of the command line, without those in `CHOSEN`.
      console: where to.

    Raises:
      ValueError: if nothing is known of the machine, or a run would refuse what is asked for on
        every mesh.
    """
    _check_names_a_model(config)
    check_trained(config)
    machine, attention = machine_of(config)
    if reason := unpredicted_reason(config, machine.device_kind):
        raise ValueError(f"plan: {reason}; see what fits with --dry-run")
    plan = make_plan(config, machine)
    trace_first(plan, machine)
    if not plan.fitting and not plan.is_too_large:
        raise ValueError(_impossible(config, plan, machine))
    batch = planned_batch_size(config, machine.devices)
    gpus = f"{machine.devices} × {machine.device_kind}"
    lines = [
        f"plan: {model_name(config)} on {gpus}, {counted(batch, 'sequence')} of"
        f" {counted(config.sequence_length, 'token')} per step, attention by {machine.attention}"
    ]
    if is_free(config, "batch_size") and batch > config.batch_size:
        lines[0] += f" (--batch-size {config.batch_size}, rounded up to a multiple of the GPUs)"
    lines += [*describe_preset(config), *describe_taken(config, ["sequence_length"])]
    _print(console, *lines, *_about_attention(config, attention), *warnings_of(config))
    best = plan.candidates[:_ROWS]
    if best:
        in_8_bits = _in_8_bits(config, machine)
        trace_first(in_8_bits, machine)
        others = in_8_bits.candidates[:_ROWS_IN_8_BITS]
        _print(console, *_table(best, others))
        _print(console, *_about_memory([*best, *others], machine))
        _print(console, *_about_8_bits(config, others))
        if Training(config.lora, config.freeze).freezes:
            _print(console, "MFU does not count gradients for frozen weights, which have none")
        _print(console, *_about_best(plan), *_commands(config, arguments, best, others))
        _print(console, *_about_data(config))
    _print(console, *_left_out(config, plan, machine))
    _print(console, *_advice(config, plan, machine))
    return bool(best)


def _check_names_a_model(config: Config) -> None:
    """Raises ValueError if nobody said which model the plan is for."""
    if config.preset != DEFAULT_PRESET or model_folder(config) is not None:
        return
    if not config.given & {"preset", "config"}:
        raise ValueError(
            "plan: expected a model; add --preset with a published one, such as --preset llama3-8b,"
            " or --init-from with a Hugging Face folder; --preset debug is the small model that is"
            " trained without either"
        )


def _about_attention(config: Config, decision: AttentionDecision) -> list[str]:
    """Lines that say what a machine needs for its kernel of attention, or for a faster one."""
    if decision.missing is not None:
        name = decision.implementation
        return [f"{name} is planned for another machine, which needs it; here {decision.missing}"]
    if decision.missed is None or _is_here(config):
        return [] if decision.missed is None else [decision.missed]
    other = f"add --attention {decision.faster} to plan for a machine that has it"
    return [f"{decision.missed}; {other}"]


def machine_of(config: Config) -> tuple[Machine, AttentionDecision]:
    """The machine that a configuration is planned for, and why it has its kernel of attention.

    Raises:
      ValueError: if the number of GPUs or their rates are not known.
    """
    here = _is_here(config)
    if config.devices is None and not here:
        kind = "" if config.device else f", and --device if they are not {_gpu_of(config)}"
        raise ValueError(
            f"devices: expected the number of GPUs that the plan is for; add --devices{kind}"
        )
    check_planned_machine(config)
    if here:
        device = jax.local_devices()[0]
        kind, memory = device.device_kind, memory_limit(device)[0]
        if kind not in RATES or memory is None:
            raise ValueError(
                f"device: no rates of {kind} are known; add --device H100, H200 or A100"
            )
        abstract = None
    else:
        gpu = GPUS[_gpu_of(config)]
        kind, memory, abstract = gpu.device.device_kind, gpu.memory, gpu.device
    sizes = MeshSizes()
    alone = dataclasses.replace(config, batch_size=1, gradient_accumulation_steps=1)
    attention = attention_decision(alone, sizes, make_abstract_mesh(sizes, abstract))
    devices = config.devices or jax.device_count()
    kernel = attention.implementation
    return Machine(devices, kind, memory, config.network_bytes, kernel, abstract), attention


def _is_here(config: Config) -> bool:
    """Whether the plan is for the GPUs of this machine."""
    return config.device is None and jax.default_backend() == "gpu"


def _gpu_of(config: Config) -> str:
    """The name in `GPUS` of the kind that a plan for another machine is for."""
    return config.device or "H200"


def _in_8_bits(config: Config, machine: Machine) -> Plan:
    """The plan in 8 bits, where nobody said whether to use them and GPUs have them; else an empty
    one. Beside adapters, the frozen weights are stored so."""
    plan = Plan()
    is_asked = not all(is_free(config, name) for name in ("fp8", "lora.base_format"))
    if is_asked or RATES[machine.device_kind].fp8_speedup <= 1:
        return plan
    changes: list[dict[str, Any]] = [{"fp8": "tensorwise"}, {"fp8": "rowwise"}]
    if config.lora.rank is not None:
        changes = [{"lora": dataclasses.replace(config.lora, base_format="rowwise")}]
    for change in changes:
        plan.fitting += make_plan(dataclasses.replace(config, **change), machine).fitting
    plan.fitting.sort(key=lambda candidate: candidate.seconds)
    return plan


def _about_memory(rows: Sequence[Candidate], machine: Machine) -> list[str]:
    """Lines that say which numbers of bytes are estimates."""
    lines, limit = [], f"{machine.limit / 1e9:.1f} GB that a run may use"
    if is_near(rows[0], machine):
        lines.append(
            "the first rows did not fit by a trace, and left the table; this one is not traced, and"
            f" near the {limit}: check it with its dry run"
        )
    others = "a dry run traces the memory of a row"
    if any(row.traced_bytes is not None for row in rows):
        others = f"the others were traced, as in a dry run, since they are near the {limit}"
    return [*lines, f"GB after ~ are estimates; {others}"]


def _about_8_bits(config: Config, others: Sequence[Candidate]) -> list[str]:
    """A line that says what rows in 8 bits are, if there are any."""
    recipe = _recipe(others[0].config if others else config)
    if recipe is None:
        return []
    flag, _ = recipe
    return [
        f"rows in 8 bits ({flag}) round the operands of matmuls; docs/how_to/fp8.md says what that"
        " does to the loss. Their MFU, too, is a share of the peak in bfloat16"
    ]


def _recipe(config: Config) -> tuple[str, str] | None:
    """The format in 8 bits of operands, or of weights that are frozen, after the flag that asks for
    it; None if there is none."""
    if config.fp8 is not None:
        return "--fp8", config.fp8
    if config.lora.base_format is not None:
        return "--lora.base-format", config.lora.base_format
    return None


def _table(rows: Sequence[Candidate], in_8_bits: Sequence[Candidate]) -> list[str]:
    """Lines of a table, as wide as it needs."""
    names = [*choices(rows[0].config, rows[0].sizes), "8 bits"]
    right = ("step", "tokens/s/GPU", "MFU", "GB")
    lines: list[Sequence[str]] = [(*names, *right)]
    for row in (*rows, *in_8_bits):
        recipe = _recipe(row.config)
        lines.append([
            *choices(row.config, row.sizes).values(), "-" if recipe is None else recipe[1],
            milliseconds(row.seconds), f"{row.prediction.tokens_per_second:,.0f}",
            f"{row.prediction.mfu:.1%}",
            f"{'~' if row.traced_bytes is None else ''}{row.bytes / 1e9:.1f}",
        ])  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if place < len(names) else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    ]


def _commands(
    config: Config,
    arguments: Sequence[str],
    best: Sequence[Candidate],
    in_8_bits: Sequence[Candidate],
) -> list[str]:
    """The commands that run the fastest configurations, and those that check one here, as lines."""
    first = [*arguments, *_flags(best[0])]
    lines = [f"to run the first: {_trainer(*first)}"]
    if in_8_bits:
        recipe = _recipe(in_8_bits[0].config) or ()
        of_8_bits = _trainer(*arguments, *_flags(in_8_bits[0]), *recipe)
        lines.append(f"to run the first in 8 bits: {of_8_bits}")
    check = _trainer("--dry-run", *_machine_flags(config), *first)
    lines.append(f"to check the first without GPUs: {check}")
    if len(best) > 1:
        mesh = shlex.join(_row_flags(best[1]))
        lines.append(
            f"to see the command of another row, add its mesh to this plan; the second's: {mesh}"
        )
    return [*lines, *_about_nodes(best[0].sizes)]


def _about_nodes(sizes: MeshSizes) -> list[str]:
    """A line that says how the command of a mesh of several nodes is started; none of one node."""
    nodes = -(-sizes.devices // GPUS_OF_A_NODE)
    if nodes == 1:
        return []
    return [
        f"{sizes.devices} GPUs are {nodes} nodes of {GPUS_OF_A_NODE}, each of which runs the"
        f" command to train as one process: under Slurm, put srun --nodes {nodes}"
        f" --ntasks-per-node 1 --gpus-per-node {GPUS_OF_A_NODE} --kill-on-bad-exit=1 before it;"
        " docs/how_to/several_nodes.md has an example, and other ways"
    ]


def _machine_flags(config: Config) -> list[str]:
    """The flags of a dry run for the machine of a plan."""
    flags = [] if _is_here(config) else ["--device", _gpu_of(config)]
    if config.plan_network != Config.plan_network:
        flags += ["--plan-network", f"{config.plan_network:g}"]
    return flags


def _trainer(*arguments: str) -> str:
    return shlex.join(["python", "-m", "train", *arguments])


def _about_best(plan: Plan) -> list[str]:
    """Lines that say which rows are as fast as the first, and where its time goes."""
    lines, best = [], plan.candidates[0]
    close = [each for each in plan.candidates[1:] if each.seconds < (1 + _ERROR) * best.seconds]
    if close:
        others = "1 other mesh is" if len(close) == 1 else f"{len(close)} other meshes are"
        lines.append(
            f"{others} predicted to take less than {_ERROR:.0%} longer than the first row, which is"
            " no more than predictions have been off; only measuring says which is the fastest"
        )
    time = best.prediction.time
    lines.append(f"the first row's step, {BY_PART}: {time}")
    if best.prediction.extrapolated:
        lines.append(f"extrapolated: {best.prediction.extrapolated}")
    return lines


def _impossible(config: Config, plan: Plan, machine: Machine) -> str:
    """Why a plan has nothing to try, in the words of a run: no mesh has the axes that were asked
    for, or each is refused."""
    if not plan.refused:
        return unfit_mesh(config, machine.devices)
    return "; ".join(plan.nearest(reason) for reason, _ in plan.refused.most_common())


def _about_data(config: Config) -> list[str]:
    """A line that says what a run trains on without the flags of its data."""
    if config.data is not None:
        return []
    if config.tokenizer is None:
        return [
            "add --data and --tokenizer: without them, a run trains on the Python manual as bytes"
        ]
    return ["add --data: without it, a run trains on the Python manual"]


def _left_out(config: Config, plan: Plan, machine: Machine) -> list[str]:
    """How much memory a plan uses, and what does not fit, as lines."""
    refused = sum(plan.refused.values())
    memory = (
        f"JAX may use {machine.memory / 1e9:.1f} GB of a GPU's memory; a plan uses up to"
        f" {machine.limit / 1e9:.1f} GB, since estimates have been up to {MARGIN:.1%} too low"
    )
    if config.model.num_experts is not None:
        memory += (
            f", and of models with experts up to {TOO_LOW_WITH_EXPERTS:.0%}: check a row with ~ by"
            " a dry run of its command"
        )
    if not refused:
        return [memory]
    tried = counted(refused, "configuration")
    if plan.candidates:
        tried = f"beside the rows, {tried} {'was' if refused == 1 else 'were'} tried that"
    do, are = ("does", "is") if refused == 1 else ("do", "are")
    return [
        memory,
        f"{tried} {do} not fit, or {are} not possible:",
        *(
            f"  {count:,} × {reason}, such as {plan.nearest(reason)}"
            for reason, count in plan.refused.most_common(_REASONS)
        ),
    ]


def _advice(config: Config, plan: Plan, machine: Machine) -> list[str]:
    """Lines that say, where nothing fits, what would."""
    if not plan.is_too_large:
        return []
    ways, tried = (("; ".join(flags)) for flags in ways_to_fit(config, machine))
    if ways:
        return [f"nothing fits; each of these would: {ways}"]
    return [f"nothing fits, nor with {tried}: use a smaller model, or more and larger GPUs"]


def _row_flags(candidate: Candidate) -> list[str]:
    """The flags of a row of the table: its mesh, and the placement of experts."""
    config, sizes = candidate.config, MeshConfig(*candidate.sizes).__dict__
    flags = [part for axis, size in sizes.items() for part in (f"--mesh.{axis}", str(size))]
    return [*flags, *["--expert-axes", config.expert_axes] * (config.model.num_experts is not None)]


def _flags(candidate: Candidate) -> list[str]:
    """The flags of a configuration."""
    config = candidate.config
    values = {
        "zero": config.zero,
        "remat": config.remat,
        "scan-layers": config.scan_layers,
        "gradient-accumulation-steps": config.gradient_accumulation_steps,
        "batch-size": config.batch_size,
    }
    others = [part for name, value in values.items() for part in (f"--{name}", str(value))]
    return [*_row_flags(candidate), *others]


def _print(console: Console, *lines: str) -> None:
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True, markup=False)
