"""Meanings of the labels of an einsum, without JAX."""

from __future__ import annotations

import re

import pytest

from collective_matmul.ops.matmul.equation import Equation, parse


@pytest.mark.parametrize(
    ("subscripts", "dimensions", "expected"),
    [
        ("sd,df->sf", (2, 2), ("sd", "df", "sf")),
        (" sd , df -> fs ", (2, 2), ("sd", "df", "fs")),
        ("s,s->", (1, 1), ("s", "s", "")),
        # Without a result: labels that occur once, in alphabetical order.
        ("zd,da", (2, 2), ("zd", "da", "az")),
        ("...d,df", (3, 2), ("ABd", "df", "ABf")),
        # What the dots stand for is aligned at the right.
        ("...d,...df->...f", (4, 3), ("ABCd", "Cdf", "ABCf")),
        ("d...,df->f...", (1, 2), ("d", "df", "f")),
        ("A...,Af->f...", (3, 2), ("ABC", "Af", "fBC")),
    ],
)
def test_parse(subscripts: str, dimensions: tuple[int, int], expected: tuple) -> None:
    assert parse(subscripts, dimensions) == expected


@pytest.mark.parametrize(
    ("subscripts", "dimensions", "sentence"),
    [
        (
            "sd->s",
            (2, 2),
            "subscripts='sd->s': 1 operand(s); expected two, separated by a comma, as in"
            " 'sd,df->sf'",
        ),
        (
            "a,b,c->a",
            (1, 1),
            "subscripts='a,b,c->a': 3 operand(s); expected two, separated by a comma, as in"
            " 'sd,df->sf'",
        ),
        (
            "s1,df->sf",
            (2, 2),
            "subscripts='s1,df->sf': '1' in 's1' is not a label; expected letters, and at most one"
            " '...' for an operand",
        ),
        (
            "......d,df->f",
            (2, 2),
            "subscripts='......d,df->f': '.' in '......d' is not a label; expected letters, and at"
            " most one '...' for an operand",
        ),
        (
            "sd,df->sf->s",
            (2, 2),
            "subscripts='sd,df->sf->s': '-' in 'sf->s' is not a label; expected letters, and at"
            " most one '...' for an operand",
        ),
        (
            "sd,df->sf",
            (3, 2),
            "subscripts='sd,df->sf': 'sd' has 2 label(s), and x has 3 dimension(s); write one label"
            " for each",
        ),
        (
            "sd,...df->sf",
            (2, 1),
            "subscripts='sd,...df->sf': '...df' has 2 label(s), and w has 1 dimension(s); write one"
            " label for each",
        ),
        (
            "...d,df->f",
            (2, 2),
            "subscripts='...d,df->f': the result has no '...'; write it where the dimensions that"
            " it stands for belong",
        ),
        (
            "sd,df->sg",
            (2, 2),
            "subscripts='sd,df->sg': the result has label 'g', which neither operand has; take it"
            " out, or name a dimension of an operand so",
        ),
        (
            "sd,df->sfs",
            (2, 2),
            "subscripts='sd,df->sfs': the result has label 's' twice; expected every label once",
        ),
    ],
)
def test_parse_refuses(subscripts: str, dimensions: tuple[int, int], sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        parse(subscripts, dimensions)


def test_subscripts_are_a_string() -> None:
    with pytest.raises(TypeError, match=r"^subscripts=0: expected a string such as 'sd,df->sf'$"):
        parse(0, (2, 2))  # pyright: ignore[reportArgumentType]


def equation(subscripts: str, label: str) -> Equation:
    operands = subscripts.partition("->")[0].split(",")
    return Equation(*parse(subscripts, [len(labels) for labels in operands]), label)


def test_roles_of_labels() -> None:
    roles = equation("besd,edf->bfes", "s")
    assert (roles.batch, roles.rows, roles.contracted, roles.columns) == ("e", "bs", "d", "f")


@pytest.mark.parametrize(
    ("subscripts", "label"),
    [("sd,df->sf", "s"), ("bstdk,dkhf->bsthf", "t"), ("sd,fd->sf", "s"), ("sd,hdf->sfh", "s")],
)
def test_matmuls(subscripts: str, label: str) -> None:
    assert equation(subscripts, label).is_matmul


@pytest.mark.parametrize(
    ("subscripts", "label"),
    [
        # Contracted, or in w.
        ("sd,df->sf", "d"),
        ("sd,df->sf", "f"),
        # Rows, or what is contracted, do not stand together, or rows come last.
        ("bds,df->bsf", "s"),
        ("sdtk,dkf->stf", "s"),
        ("sd,df->fs", "s"),
        ("bsd,df->sbf", "s"),
        # A batch label.
        ("esd,edf->esf", "s"),
        # Nothing contracted; no columns.
        ("s,f->sf", "s"),
        ("sd,d->s", "s"),
    ],
)
def test_no_matmuls(subscripts: str, label: str) -> None:
    assert not equation(subscripts, label).is_matmul


@pytest.mark.parametrize(
    ("subscripts", "label", "transposed"),
    [
        ("sd,df->sf", "s", ()),
        ("sd,fd->sf", "s", ()),
        ("ds,df->fs", "s", ()),
        ("esd,efd->esf", "e", ()),
        ("bsd,dhk->bhsk", "s", ("bhsk",)),
        # Columns in another order, of a matmul: moving w is enough.
        ("sd,dhk->skh", "s", ("dhk",)),
        ("bsd,dhk->skhb", "s", ("skhb",)),
        ("skd,dkf->sf", "s", ("dkf",)),
        # The batch is innermost.
        ("sde,edf->esf", "s", ("sde",)),
        ("se,se->se", "s", ()),
    ],
)
def test_what_has_to_be_moved(subscripts: str, label: str, transposed: tuple[str, ...]) -> None:
    assert equation(subscripts, label).transposed == transposed


def test_gradients() -> None:
    of_x, of_w = equation("esd,edf->esf", "s").gradients
    assert (str(of_x), str(of_w)) == ("esf,edf->esd", "esd,esf->edf")
    of_x, of_w = equation("sd,sf->df", "s").gradients
    assert (str(of_x), str(of_w)) == ("sf,df->sd", "sd,df->sf")
