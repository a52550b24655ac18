"""Measured seconds per site: tables that ship with the library, and the user's own."""

from collective_matmul.choose.tables.files import cache_path, known
from collective_matmul.choose.tables.lookup import Prediction, look_up
from collective_matmul.choose.tables.table import CEILING, Entry, Run, Table

__all__ = [
    "CEILING",
    "Entry",
    "Prediction",
    "Run",
    "Table",
    "cache_path",
    "known",
    "look_up",
]
