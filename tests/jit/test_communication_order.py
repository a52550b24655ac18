"""The order in which compiled programs communicate, as processes compare it."""

from __future__ import annotations

import jax
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from collective_matmul.jit.communication_order import communication_order
from tests.conftest import MeshFactory
from tests.reference import AXIS

#: Instructions of a scheduled program for GPUs, shortened.
PROGRAM = """\
HloModule jit_step, is_scheduled=true

%region.1 (x: f32[], y: f32[]) -> f32[] {
  ROOT %add.2 = f32[] add(%x, %y)
}

%body (loop: (s32[], bf16[8,4])) -> (s32[], bf16[8,4]) {
  %permute.1 = bf16[8,4]{1,0} collective-permute(%x), metadata={op_name="jit(step)/while"}
}

ENTRY %main (x: bf16[8,4]) -> bf16[8,4] {
  %x = bf16[8,4]{1,0:T(8)} parameter(0)
  %gather.1 = (bf16[8,4], bf16[16,4]{1,0}) all-gather-start(%x), metadata={op_name="jit(step)/a"}
  %cublas.1 = (f32[16,4]{1,0}, s8[99]) custom-call(%x), custom_call_target="__cublas$gemm"
  %gather.2 = bf16[16,4]{1,0} all-gather-done(%gather.1), metadata={op_name="jit(step)/a"}
  %fused.1 = bf16[16,4]{1,0} custom-call(%x), custom_call_target="mosaic_gpu_v2", metadata={\
op_name="jit(step)/collective_matmul.decision3_17/all_gather_matmul"}
  ROOT %sum.1 = bf16[16,4]{1,0} all-reduce(%fused.1), to_apply=%region.1
}
"""


def test_instructions_that_communicate_in_order() -> None:
    assert communication_order(PROGRAM) == [
        "all-gather-start (bf16[8,4], bf16[16,4]) of jit(step)/a",
        "Mosaic kernel bf16[16,4] of jit(step)/all_gather_matmul",
        "all-reduce bf16[16,4]",
        "collective-permute bf16[8,4] of jit(step)/while",
    ]


def test_two_orders_of_a_compiled_program_differ(make_mesh: MeshFactory) -> None:
    mesh = make_mesh({AXIS: 2})

    def order(swapped: bool) -> list[str]:
        def fun(x: jax.Array) -> jax.Array:
            if swapped:
                return lax.all_gather(lax.psum(x, AXIS) ** 2, AXIS)
            return lax.psum(lax.all_gather(x, AXIS) ** 2, AXIS)

        jitted = jax.jit(jax.shard_map(fun, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS)))
        return communication_order(jitted.lower(np.ones(8, np.float32)).compile().as_text() or "")

    assert len(order(False)) == len(order(True)) == 2
    assert order(False) == order(False) != order(True)
