"""``python -m train.compare --preset debug --a overlap=xla --b overlap=ring``

Trains variants of one configuration from one seed on the same data, and prints how far their loss
curves differ from that of the first.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import string
import sys
from collections.abc import Sequence

from rich.console import Console

from models.simulated_devices import simulate_devices
from train.config.config import SIMULATED_DEVICES, Config
from train.log.metrics import Record
from train.memory.device_memory import set_memory_fraction
from train.run.command_line import announce, parse, refusing
from train.run.loop import train
from train.run.setup import prepare
from train.run.unsupported_flags import naming_flags


def main(arguments: Sequence[str]) -> None:
    """Trains all variants and prints how each differs from the first."""
    parser = argparse.ArgumentParser(
        prog="python -m train.compare",
        description="Train variants from one seed and compare their loss curves. Every flag of"
        " `python -m train` sets what both share.",
        allow_abbrev=False,
    )
    for name, more in (("--a", ""), ("--b", "; may be given several times, for more variants")):
        parser.add_argument(
            name,
            nargs="+",
            action="append",
            required=True,
            metavar="FIELD=VALUE",
            help=f"what this variant sets, as in: overlap=ring mesh.tensor=4{more}",
        )
    parser.add_argument(
        "--verbose",
        action="store_true",
        help="print every step of both runs, and their models, meshes and data",
    )
    variants, shared = parser.parse_known_args(arguments)
    console = Console()
    with refusing():
        set_memory_fraction()
        if len(variants.a) > 1:
            raise ValueError(
                f"--a given {len(variants.a)} times: expected once, with all that it sets; further"
                " variants are --b"
            )
        changes = dict(zip(string.ascii_lowercase, [*variants.a, *variants.b], strict=False))
        configs = {name: _variant(shared, changed) for name, changed in changes.items()}
        for field in ("steps", "cpu_devices"):
            values = [getattr(config, field) for config in configs.values()]
            if len(set(values)) > 1:
                raise ValueError(
                    f"{field}={' and '.join(map(str, dict.fromkeys(values)))}: expected the same in"
                    " all variants"
                )
        simulate_devices("cpu_devices", configs["a"].cpu_devices, SIMULATED_DEVICES)
        curves = {}
        for name, config in configs.items():
            console.rule(f"{name}: {' '.join(changes[name])}")
            with naming_flags(config):
                curves[name] = _curve(name, config, console, variants.verbose)
    first = curves.pop("a")
    for name, curve in curves.items():
        console.rule("comparison" if len(curves) == 1 else f"comparison of a and {name}")
        console.print(describe(first, curve, name), highlight=False)


def _curve(name: str, config: Config, console: Console, verbose: bool) -> list[Record]:
    """Trains and returns every step. Prints all of it if `verbose`, else a line per log
    interval."""
    setup = prepare(dataclasses.replace(config, log_interval=1))
    if verbose:
        announce(setup, console)
        return train(setup, console)

    def progress(record: Record) -> None:
        if record.step % config.log_interval == 0:
            line = f"{name}: step {record.step} of {config.steps}, loss {record.loss:.4f}"
            console.print(line, highlight=False)

    return train(setup, Console(quiet=True), progress)


def _variant(shared: Sequence[str], changes: Sequence[str]) -> Config:
    """The configuration of a variant.

    Raises:
      ValueError: for a change that is not FIELD=VALUE, or a run that would leave files.
    """
    for change in changes:
        if "=" not in change:
            raise ValueError(f"{change!r}: expected FIELD=VALUE, as in overlap=ring")
    config = parse([*shared, *(f"--{change}" for change in changes)], "python -m train.compare")
    for name in ("dry_run", "plan", "print_config", "resume", "wandb"):
        if getattr(config, name):
            raise ValueError(f"{name}: comparing trains all variants from step 0; leave it out")
    for name in ("checkpoint_dir", "log_file", "tensorboard"):
        if getattr(config, name) is not None:
            raise ValueError(
                f"{name}={getattr(config, name)!r}: comparing keeps no files; leave it out"
            )
    return config


def describe(a: Sequence[Record], b: Sequence[Record], name: str = "b") -> str:
    """Describes the largest difference between two curves and the median step time of each."""
    differences = {x.step: abs(x.loss - y.loss) for x, y in zip(a, b, strict=True)}
    step = max(differences, key=differences.__getitem__)

    def median_seconds(records: Sequence[Record]) -> float:
        return statistics.median_high(record.step_seconds for record in records)

    return (
        f"largest difference in loss: {differences[step]:.3g} nats, at step {step} of {len(a)}\n"
        f"last loss: a {a[-1].loss:.6f}, {name} {b[-1].loss:.6f}\n"
        f"median step: a {median_seconds(a):.4f} s, {name} {median_seconds(b):.4f} s,"
        f" a / {name} {median_seconds(a) / median_seconds(b):.3f}"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
