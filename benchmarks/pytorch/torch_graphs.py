"""CUDA graphs that share the memory of their temporary arrays."""

# PyTorch is not a dependency: where it is not installed, nothing here is imported.
# pyright: reportMissingImports=false

from __future__ import annotations

import torch

from benchmarks.pytorch.torch_programs import Run


class GraphPool:
    """Memory of CUDA graphs of which one runs after the other, in any order."""

    def __init__(self) -> None:
        self._open()

    def captured(self, run: Run) -> Run:
        """One CUDA graph that computes what `run` does, without its results."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        try:
            # NCCL's watchdog asks for events from a thread of its own, which other modes forbid.
            with torch.cuda.graph(graph, self._first.pool(), capture_error_mode="thread_local"):
                run()
        except Exception:
            self._open()  # A capture that failed may leave its pool unusable.
            raise

        def replay(kept: Run = run) -> None:
            del kept  # It keeps the arguments alive, which the graph reads.
            graph.replay()

        return replay

    def _open(self) -> None:
        """Begins a pool with a graph that keeps it alive."""
        self._first = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._first, capture_error_mode="thread_local"):
            torch.zeros(1, device="cuda")
