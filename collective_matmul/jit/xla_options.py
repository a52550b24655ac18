"""XLA's compiler options under which communication overlaps with matmuls on NVIDIA GPUs."""

from __future__ import annotations

from types import MappingProxyType

#: How permutes are executed. The value in `OVERLAP_OPTIONS` needs all GPUs of a ring in a process.
PERMUTE_MODE = "xla_gpu_collective_permute_mode"

#: XLA options under which a ring of permutes runs beside its matmuls on NVLink GPUs. Each is
#: ignored by compilers for other platforms.
OVERLAP_OPTIONS = MappingProxyType(
    {
        # A permute is a copy between peers, on a copy engine: it takes no multiprocessor from the
        # matmul, and needs every GPU of the ring in one process.
        PERMUTE_MODE: "COLLECTIVES_PEER_MEMORY",
        # Merging the matmuls of chunks that share a weight makes the first wait for the last.
        "xla_gpu_dot_merger_threshold_mb": "0",
        # A backward ring sends an accumulator and an operand at once.
        "xla_gpu_experimental_parallel_collective_overlap_limit": "2",
    }
)

_SYNCHRONOUS = "xla_gpu_disable_async_collectives"

#: Options without which kernels that address peers' memory are not safe: see
#: `collective_matmul.peer_access.peer_kernels_disallowed_reason`.
PEER_KERNEL_OPTIONS = MappingProxyType(
    {
        # Collectives that NCCL's kernels execute wait for ours, and ours for them.
        _SYNCHRONOUS: (
            "ALLREDUCE,ALLGATHER,REDUCESCATTER,COLLECTIVEBROADCAST,ALLTOALL,RAGGEDALLTOALL"
        ),
        # Kernels that address peers share one workspace: no CUDA graph may launch two of them at
        # once, as it might where neither needs the other's result.
        "xla_gpu_command_buffer_scheduling_mode": "SERIALIZE",
    }
)


def peer_kernel_options(processes: int) -> dict[str, str]:
    """Returns `PEER_KERNEL_OPTIONS` for programs of this many processes.

    Within one process permutes are copies, which hold no multiprocessor. Across processes NCCL's
    kernels execute them too.
    """
    options = dict(PEER_KERNEL_OPTIONS)
    if processes > 1:
        options[_SYNCHRONOUS] += ",COLLECTIVEPERMUTE"
    return options
