"""Numbers that a dry run, a plan and its page print: those about one thing are one number."""

from __future__ import annotations

import dataclasses
import re
import shlex
from pathlib import Path

import pytest

from models.parameters.adapters import LoraConfig
from train.config.config import Config, MeshSizes
from train.config.presets import PRESETS
from train.memory.device_memory import GPUS, MARGIN
from train.plan.candidates import choices, describe
from train.plan.run import predict_run
from train.plan.traced_rows import TOO_HIGH, TOO_HIGH_IF_UNSURE, TOO_LOW_WITH_EXPERTS
from train.run.command_line import main

PAGE = Path(__file__).parents[3] / "docs/how_to/plan.md"
H100 = GPUS["H100"]


def printed(arguments: str, capsys: pytest.CaptureFixture, status: int = 0) -> str:
    if status:
        with pytest.raises(SystemExit, match=f"^{status}$"):
            main(shlex.split(arguments))
    else:
        main(shlex.split(arguments))
    return capsys.readouterr().out


DRY_RUN = (
    "--dry-run --preset llama3-8b --device H100 --mesh.data 1 --mesh.tensor 8"
    " --model.num-layers 1 --batch-size {}"
)


def test_a_dry_run_says_what_each_of_its_sums_counts(capsys) -> None:
    output = printed(DRY_RUN.format(8), capsys)
    text = " ".join(output.split())  # The totals of ops are wrapped.
    milliseconds, xla = map(
        float, re.findall(r"times are predicted: (\S+) ms, (\S+) ms with xla", text)[0]
    )
    communication, hidden, left = map(
        float,
        re.findall(
            r"communicate for (\S+) ms with xla, which hides nothing; of that, (\S+) ms \(\d+%\)"
            r" are hidden under matmuls, and (\S+) ms are left",
            text,
        )[0],
    )
    # What is hidden is what backends save, here of all by a cost model, and the rest is there.
    assert xla - hidden == pytest.approx(milliseconds, abs=0.02)
    assert communication - hidden == pytest.approx(left, abs=0.02)
    # The table adds up to that sum.
    rows = re.findall(r"^(\d+)× +(?:for|back)ward +\S+ +\S+ +(\d+) ", output, re.MULTILINE)
    assert sum(int(runs) * int(µs) for runs, µs in rows) == pytest.approx(
        1e3 * milliseconds, abs=sum(int(runs) for runs, _ in rows)
    )
    lines = output.splitlines()
    [parts] = [number for number, line in enumerate(lines) if line.startswith("the whole step,")]
    assert "so their sums differ" in lines[parts - 1]


@pytest.mark.parametrize(("batch", "verdict"), [(8, "fits"), (1024, "does not fit")])
def test_the_last_line_of_a_dry_run_says_whether_it_fits(batch: int, verdict: str, capsys) -> None:
    output = printed(DRY_RUN.format(batch), capsys, status=int(verdict != "fits"))
    assert re.search(f"^{verdict} into ", output, re.MULTILINE)
    assert output.splitlines()[-1].endswith(f"; the run {verdict}")


def test_adapters_are_a_part_of_a_step() -> None:
    """So that the matmuls of the parts are those of the table."""
    run = PRESETS["llama3-8b"]()
    sizes = MeshSizes(tensor=2)
    frozen = dataclasses.replace(run, lora=LoraConfig(rank=16))
    kind = H100.device.device_kind
    whole, adapted = (predict_run(each, sizes, kind, "cudnn").time for each in (run, frozen))
    assert whole.adapters == 0 < adapted.adapters
    assert f" + adapters {1e3 * adapted.adapters:.0f} + " in str(adapted)
    # Frozen weights have no gradients, and nothing else is different.
    assert 0.6 < adapted.matmuls / whole.matmuls < 0.7


def test_an_example_of_what_does_not_fit_has_the_columns_of_the_table(capsys) -> None:
    model = "--preset llama3-70b --batch-size 8 --lora.rank 16 --scan-layers 1"
    output = printed(f"--plan {model} --device H100 --devices 8", capsys)
    [example] = re.findall(r"gradients do not fit, such as (.*?): takes (\S+) GB", output)
    mesh, *others = example[0].split(", ")
    assert [other.rpartition(" ")[0] for other in others] == [
        "ZeRO", "remat", "scan", "microbatches"
    ]  # fmt: skip
    # No row has the same values: it fits, and this one does not.
    values = [mesh, *(other.rpartition(" ")[2] for other in others)]
    rows = [line.split("  ") for line in output.splitlines() if line.startswith("data=")]
    cells = [[cell.strip() for cell in row if cell.strip()] for row in rows]
    assert cells and all(row[: len(values)] != values for row in cells if row[5] == "-")


def test_every_choice_of_a_plan_is_in_the_description() -> None:
    run, sizes = PRESETS["qwen3-30b-a3b"](), MeshSizes(fsdp=2, tensor=2)
    changed: list[Config] = [
        dataclasses.replace(run, **{name: value})
        for name, value in {
            "zero": 3, "remat": "full", "scan_layers": 1, "gradient_accumulation_steps": 2,
            "expert_axes": "both",
        }.items()
    ]  # fmt: skip
    texts = {describe(each, sizes) for each in (run, *changed)} | {describe(run, MeshSizes())}
    assert len(texts) == 2 + len(changed)
    assert set(choices(run, sizes)) == {"mesh", "ZeRO", "remat", "scan", "microbatches", "experts"}


def test_what_does_not_fit_comes_after_the_commands(capsys) -> None:
    output = printed("--plan --preset llama3-8b --device H100 --devices 8", capsys)
    command, left_out = output.index("to run the first: "), output.index("beside the rows, ")
    assert output.index("mesh  ") < command < left_out
    last = [line for line in output.splitlines() if not line.startswith("  ")][-1]
    assert re.fullmatch(
        r"beside the rows, [\d,]+ configurations were tried that do not fit, or are not possible:",
        last,
    )


@pytest.mark.parametrize(
    ("flags", "status", "sentence"),
    [
        ("11", 0, "beside the rows, 1 configuration was tried that does not fit, or is"),
        ("12", 0, "beside the rows, 2 configurations were tried that do not fit, or are"),
        ("40 --remat full --scan-layers 1", 1, "1 configuration does not fit, or is"),
    ],
)  # fmt: skip
def test_one_configuration_is_counted_in_the_singular(
    flags: str, status: int, sentence: str, capsys
) -> None:
    machine = "--plan --preset llama3-8b --device H100 --devices 1 --batch-size 1"
    output = printed(f"{machine} --model.num-layers {flags}", capsys, status=status)
    assert f"{sentence} not possible:" in output.splitlines()


def percent(share: float) -> str:
    return f"{100 * share:g} %"


def test_the_page_has_the_numbers_that_a_plan_prints(capsys) -> None:
    section = PAGE.read_text().partition("\n## Memory\n")[2]
    text = " ".join(section.split())
    bounds = (
        f"its estimate is up to {percent(MARGIN)} too low, so as much of a GPU's memory stays free;"
        f" and up to {percent(TOO_HIGH)} too high, or up to"
        f" {percent(TOO_HIGH_IF_UNSURE)} too high beside frozen weights and with experts,"
        f" whose estimate may also be up to {percent(TOO_LOW_WITH_EXPERTS)} too low"
    )
    assert bounds in text
    # And none beyond them.
    most = {"low": MARGIN, "high": TOO_HIGH}
    errors = re.findall(r"([\d.]+) % too (low|high)", text.replace(bounds, ""))
    assert len(errors) > 10
    assert all(float(error) <= 100 * most[way] for error, way in errors), errors
    [higher] = re.findall(r"up to ([\d.]+) % higher than the dry run", text)
    assert float(higher) <= 100 * TOO_HIGH_IF_UNSURE

    machine = "--plan --device H100 --devices 1 --preset llama3-8b --batch-size 2"
    output = printed(f"{machine} --model.num-layers 15", capsys, status=1)
    assert f"estimates have been up to {MARGIN:.1%} too low" in output
