"""Which implementation carries out an op, and a record of what was chosen."""

from collective_matmul.choose.decision import Decision, choose, record_decisions
from collective_matmul.choose.site import Einsum, Site

__all__ = ["Decision", "Einsum", "Site", "choose", "record_decisions"]
