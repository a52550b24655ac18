"""The names of collective_matmul that benchmarks use and that are not public.

No other module of benchmarks imports such names. Timing, random operands, the programs of single
sites and the shapes of models are those of `collective_matmul.tune`: benchmarks and tables of
measurements mean the same.
"""

# Unused here: other modules import these names from this one.
# ruff: noqa: F401

from __future__ import annotations

from collective_matmul.agreement import exchange
from collective_matmul.data import MeasuredData, Record, shipped
from collective_matmul.dispatch.contract import Configuration
from collective_matmul.dispatch.recording import Decision
from collective_matmul.dispatch.repetitions import filler
from collective_matmul.dispatch.selection import reference_alone
from collective_matmul.dispatch.tables.table import COMPUTE_ONLY
from collective_matmul.jit.communication_order import communication_order
from collective_matmul.mosaic_gpu.device import target as kernel_target
from collective_matmul.mosaic_gpu.hopper_matmul.chunk_matmul import shared_launch
from collective_matmul.mosaic_gpu.hopper_matmul.tiling import (
    MatmulProblem,
    MeasuredTiling,
    Tiling,
    candidate_tilings,
    predicted_microseconds,
)
from collective_matmul.operands.format import FORMATS, PLAIN, Format
from collective_matmul.operands.scaled.scaled_chunks import multiply as multiply_in_place
from collective_matmul.ops.attention import choice as attention_choice
from collective_matmul.ops.attention.request import AttentionRequest
from collective_matmul.ops.matmul.backend import MatmulBackend as Backend
from collective_matmul.ops.matmul.backends import BACKENDS, REFERENCE
from collective_matmul.ops.matmul.checks import RecipeName
from collective_matmul.ops.matmul.measured_program import Stack as SiteProgram
from collective_matmul.ops.matmul.measured_program import StackOperands as SiteOperands
from collective_matmul.ops.matmul.model_requests import LAYERS, Layer
from collective_matmul.ops.matmul.request import Site
from collective_matmul.tuning.timing import Timing, measure
