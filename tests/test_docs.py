"""The README and docs show what happens: examples run, commands exist, links lead somewhere."""

from __future__ import annotations

import contextlib
import doctest
import importlib
import io
import itertools
import re
import shlex
import tomllib
import typing
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from collective_matmul.dispatch.registry import OPS, unregister_op
from collective_matmul.operands.format import FORMATS, unregister_format
from collective_matmul.ops.matmul.backends import BACKENDS, unregister
from docs import flag_tables
from models.blocks.rematerialization import Remat
from models.command_line import main as models
from models.families import FAMILIES
from tests.test_conventions import LIBRARY, PUBLIC_MODULES, REPOSITORY
from train.config.optimizers import OPTIMIZERS
from train.run.command_line import main as train

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")], key=lambda page: page.relative_to(ROOT).parts
)
#: What pages may register, by name, and how it is removed.
REGISTERED = (
    (BACKENDS, unregister),
    (FORMATS, unregister_format),
    (OPS, unregister_op),
    (FAMILIES, FAMILIES.pop),
    (OPTIMIZERS, OPTIMIZERS.pop),
)
FOLDERS = ("collective_matmul", "models", "train", "benchmarks", "docs", "tests")


class Block(NamedTuple):
    """A fenced block of a page. Sphinx's directives are blocks of languages such as "{toctree}"."""

    language: str
    line: int
    text: str


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks_of(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for match in re.finditer(r"^```([\w{}-]*)[^\n]*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        yield Block(match[1], text[: match.start()].count("\n") + 2, match[2])


def pages_with(language: str) -> list[Path]:
    return [page for page in PAGES if any(b.language == language for b in blocks_of(page))]


@cache
def run_examples(page: Path) -> dict[str, Any]:
    """Runs the Python blocks of a page in order, in one namespace, which is returned.

    A text block right after a Python block that prints is compared with what it printed; ``...``
    stands for anything. What the page registers is gone afterwards.
    """
    before = [(names, remove, set(names)) for names, remove in REGISTERED]
    try:
        return _run_blocks(page)
    finally:
        for names, remove, registered in before:
            for name in names.keys() - registered:
                remove(name)


def _run_blocks(page: Path) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "__main__"}
    blocks = list(blocks_of(page))
    for block, following in zip(blocks, [*blocks[1:], None], strict=True):
        if block.language != "python":
            continue
        printed = io.StringIO()
        # Errors name the line of the page.
        source = "\n" * (block.line - 1) + block.text
        with contextlib.redirect_stdout(printed):
            exec(compile(source, str(page), "exec"), names)
        if following is not None and following.language == "text" and "print(" in block.text:
            matches = doctest.OutputChecker().check_output(
                following.text, printed.getvalue(), doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
            )
            assert matches, f"{name_of(page)}:{following.line}: printed\n{printed.getvalue()}"
    return names


@pytest.mark.parametrize("page", pages_with("python"), ids=name_of)
def test_python_blocks_run_and_print_what_the_page_shows(page):
    run_examples(page)


def test_readme_examples_compute_the_same_as_plain_code():
    names = run_examples(ROOT / "README.md")
    # Rounding of float32 sums over 256 features.
    np.testing.assert_allclose(names["after"], names["before"], rtol=1e-4, atol=1e-5)
    x, w_in, w_out = map(np.asarray, names["args"])
    expected = jax.nn.gelu(x @ w_in) @ w_out
    for result in (names["y"], names["same"]):
        # Sums of 256 products of float32, in another order.
        np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-3)


def bars_and_report_of(page: Path) -> tuple[list[str], Path]:
    """The bars of the chart of a page, and the report that the page says they are from."""
    chart = next(b.text for b in blocks_of(page) if "█" in b.text)
    text = page.read_text(encoding="utf-8")
    source = re.search(r"^Source: \[report\]\(([^)]+)\)", text, re.MULTILINE)
    assert source is not None
    return [line for line in chart.splitlines() if "█" in line], page.parent / source[1]


def test_chart_of_the_readme_is_drawn_from_its_report():
    bars, report = bars_and_report_of(ROOT / "README.md")
    shown = ("torch_async_tp", "auto"), ("torch_async_tp_fp8_tensorwise", "auto_fp8_tensorwise")
    sharded = ("torch_fsdp", "auto"), ("auto_fp8_tensorwise",)
    expected = []
    for which, groups in (("2×8192", shown), ("2×8192 ZeRO 3", sharded)):
        for candidate in itertools.chain(*groups):
            row = rf"^\| llama3-8b 32 layers {which} \| {candidate} (?:\|[^|]*){{3}}\| ([\d,]+) "
            found = re.search(row, report.read_text(encoding="utf-8"), re.MULTILINE)
            assert found is not None, (which, candidate)
            expected.append((found[1], round(int(found[1].replace(",", "")) / 500)))
    assert [(bar.split()[-2], bar.count("█")) for bar in bars] == expected


def test_chart_of_single_ops_is_drawn_from_its_report():
    bars, report = bars_and_report_of(ROOT / "docs" / "reference" / "benchmarks.md")
    assert bars == drawn_bars(report)


def drawn_bars(report: Path) -> list[str]:
    """One line for each width and number of rows, gathers left, scatters right."""
    times = read_times(report)
    lines = []
    for widths in ("8B", "70B"):
        for rows in (16, 64, 128, 256, 512, 1024, 2048, 4096):
            gather, scatter = (
                speed_up(times[f"{op} {widths} M={rows}"])
                for op in ("all_gather_matmul", "matmul_reduce_scatter")
            )
            left = f"{rows:>10}  {gather:.2f}×  {'█' * round(gather * 10):<25}"
            lines.append(f"{left}  {scatter:.2f}×  {'█' * round(scatter * 10)}")
    return lines


def speed_up(times: dict[str, float]) -> float:
    ours = [times[name] for name in ("ring", "fused", "one_shot") if name in times]
    return times["bulk"] / min(ours)


def read_times(report: Path) -> dict[str, dict[str, float]]:
    """Microseconds by case and candidate, from the first table of a report."""
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in report.read_text(encoding="utf-8").splitlines()
        if line.startswith("|")
    ]
    names = rows[0][1:]
    return {
        case: {name: float(x) for name, x in zip(names, cells, strict=True) if x not in ("", "-")}
        for case, *cells in rows[2:]
    }


def test_numbers_in_benchmark_tables_are_in_the_reports_of_their_section():
    page = ROOT / "docs/reference/benchmarks.md"
    for section in re.split(r"^##+ ", page.read_text(encoding="utf-8"), flags=re.MULTILINE):
        reports = re.findall(r"\]\(\.\./\.\./(benchmarks/reports/[^)]+\.md)\)", section)
        reported = [
            float(number)
            for report in reports
            for number in NUMBER.findall((ROOT / report).read_text(encoding="utf-8"))
        ]
        tables = [line for line in section.splitlines() if re.match(r"\| (?!:?--)", line)]
        for number in NUMBER.findall(" ".join(map(measured_cells, tables))):
            digits = len(number.partition(".")[2])
            # A report may round a number before the page does.
            allowed = 0.5 * 10.0**-digits * 1.1
            assert any(abs(float(number) - x) <= allowed for x in reported), f"{number}: {section}"


NUMBER = re.compile(r"\d+(?:\.\d+)?")


def measured_cells(row: str) -> str:
    """The cells of a row but its label, without thousands separators and ratios to another cell."""
    cells = row.strip("|").split("|")[1:]
    cells = [re.sub(r"\[[^]]*\]\([^)]*\)", "", cell) for cell in cells]
    return " ".join(re.sub(r"[\d.]+×|[A-Z]=\d+|\d+B", "", cell) for cell in cells)


def test_every_page_is_listed_in_the_index():
    index = ROOT / "docs/index.md"
    linked = {(index.parent / target).resolve() for target in links_of(index)}
    assert {*PAGES} - {index} <= linked


def test_every_public_name_has_a_page():
    """Sphinx fails for names that are listed here and do not exist."""
    page = ROOT / "docs/reference/api.md"
    documented, module = set(), ""
    for block in blocks_of(page):
        for line in block.text.splitlines():
            if line.startswith(".. currentmodule:: "):
                module = line.split()[-1]
            elif line.startswith(".. py:data:: "):
                documented.add(line.split()[-1])
            elif re.fullmatch(r" +\w+", line):
                documented.add(f"{module}.{line.strip()}")
    public = {
        f"{module}.{name}"
        for module in PUBLIC_MODULES
        for name in importlib.import_module(module).__all__
    }
    assert documented == public


def test_every_flag_is_in_the_tables():
    shown = set(re.findall(r"\| `--([\w.-]+)` \|", flag_tables.pages()))
    printed = help_of("train")
    for command in ("import", "export", "generate"):
        printed += help_of("models", command)
    flags = set(re.findall(r"--([a-z][\w.-]*\w)", printed))
    # The help also has the names that turn switches off.
    on = {flag for flag in flags if not re.search(r"(^|\.)no-", flag)}
    assert on - {"help"} == shown


@pytest.mark.exhaustive
def test_the_commands_of_a_first_run_follow_each_other(tmp_path, monkeypatch, capsys):
    """With fewer steps, and without the interruption between the first and the second."""
    page = (ROOT / "docs/how_to/training.md").read_text(encoding="utf-8")
    section = page.partition("\n## A first run\n")[2].partition("\n## ")[0]
    commands = re.findall(r"`python -m ([^`]+)`", section)
    assert len(commands) == 5
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    monkeypatch.chdir(tmp_path)
    for command in commands:
        program, *arguments = shlex.split(command.replace("--steps 300", "--steps 2"))
        (train if program == "train" else models)(arguments)
    output = capsys.readouterr().out
    for expected in ("done: 2 steps", "nothing to train", "held-out loss", "exported: "):
        assert expected in output


def test_every_value_of_remat_is_explained():
    (row,) = re.findall(r"^\| `--remat` \|.*$", flag_tables.pages(), re.MULTILINE)
    for value in typing.get_args(Remat):
        assert f"({value})" in row


def test_the_readme_says_how_to_install_for_every_version_of_cuda():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for name in project["optional-dependencies"]:
        assert not name.startswith("cuda") or f"'.[{name}]'" in readme


#: Strings of the code that look like environment variables, and are not.
NOT_VARIABLES = {"CAUSAL_LM", "COLLECTIVES_PEER_MEMORY"}


def test_every_environment_variable_is_in_the_table():
    page = (ROOT / "docs/reference/environment.md").read_text(encoding="utf-8")
    public = set(importlib.import_module(LIBRARY).__all__)
    read = {
        place.text
        for module in REPOSITORY.below(LIBRARY, "models", "train")
        for place in module.strings()
        if re.fullmatch(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)+", place.text)
    }
    assert read - public - NOT_VARIABLES == set(re.findall(r"`([A-Z0-9]+_[A-Z0-9_]+)`", page))


def test_workflow_runs_what_contributors_run():
    workflow = (ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8")
    assert re.search(r"^ +run: \.ci/run$", workflow, re.MULTILINE)


@pytest.mark.parametrize("page", [*PAGES, *ROOT.glob("benchmarks/reports/*.md")], ids=name_of)
def test_links_lead_to_files_and_headings(page):
    for target in links_of(page):
        path, _, heading = target.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), f"{name_of(page)}: {target}"
        if heading:
            assert heading in headings_of(file), f"{name_of(page)}: {target}"


def links_of(page: Path) -> list[str]:
    """Targets of the links of a page, without those that leave the repository."""
    return re.findall(r"\]\((?!https?:)([^)\s]+)\)", without_blocks(page))


def without_blocks(page: Path) -> str:
    text = page.read_text(encoding="utf-8")
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def headings_of(page: Path) -> set[str]:
    """The anchors that GitHub gives to headings."""
    headings = re.findall(r"^#+ (.*)$", without_blocks(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_named_in_prose_exist(page):
    text = without_blocks(page)
    # Words in capitals stand for others, as in benchmarks/reports/DATE-BENCHMARK.
    pattern = rf"`((?:{'|'.join(FOLDERS)})/[\w./\-]*)`"
    for path in (path for path in re.findall(pattern, text) if not re.search("[A-Z]{3}", path)):
        assert (ROOT / path).exists(), f"{name_of(page)}: {path}"


def commands_of(page: Path) -> Iterator[list[str]]:
    """The words of every command shown after a ``$``, lines joined."""
    for block in blocks_of(page):
        if block.language == "console":
            joined = block.text.replace("\\\n", " ")
            for line in joined.splitlines():
                if line.startswith("$ "):
                    yield shlex.split(line[2:], comments=True)


def shown_commands() -> list[Any]:
    return [
        pytest.param(command, id=f"{name_of(page)}: {' '.join(command)}"[:80])
        for page in PAGES
        for command in commands_of(page)
    ]


@pytest.mark.parametrize("command", shown_commands())
def test_commands_exist_with_their_flags(command):
    command = [word for word in command if not re.match(r"[A-Z_]+=", word) or word[:4] == "ARGS"]
    if command[0] == "make":
        check_make(command[1:])
    elif command[:2] == ["python", "-m"]:
        flags = {word.partition("=")[0] for word in command if word.startswith("--")}
        help_text = help_of(command[2], *positional(command[3:]))
        if command[2] == "train.compare":  # It takes every flag of the trainer too.
            help_text += help_of("train")
        for flag in flags:
            assert re.search(rf"{flag}\b", help_text), f"{flag} is not in the help"


def check_make(words: list[str]) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for word in words:
        if word.startswith("ARGS="):
            continue
        assert re.search(rf"^{word}:", makefile, re.MULTILINE), f"make {word}"


def positional(words: list[str]) -> list[str]:
    """The subcommand, which stands first if there is one."""
    return words[:1] if words and re.fullmatch(r"[a-z]+", words[0]) else []


@cache
def help_of(module: str, *subcommand: str) -> str:
    """Text that a command line prints for ``--help``."""
    main = importlib.import_module(f"{module}.__main__" if "." not in module else module).main
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), pytest.raises(SystemExit):
        main([*subcommand, "--help"])
    return printed.getvalue()
