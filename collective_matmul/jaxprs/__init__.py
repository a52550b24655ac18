"""Walks over jaxprs: the one place that knows how equations hold jaxprs.

What goes in is a jaxpr. What comes out are descriptions of it. Two functions make programs of
jaxprs: `with_jaxprs` exchanges those that an equation executes, and `split_pullback` (pullback.py)
divides a function and its pullback, so that nothing made of weights alone is kept between them.

- `bodies_of` (bodies.py): the jaxprs that an equation executes, how often, and how their arguments
  and results are connected with its own, for calls, loops and branches.
- `Scope`, `all_equations`, `counted_equations`, `distinct_equations`, `Holds` (walks.py): walks in
  the order of the program. `without_dead_code` (dead_code.py): what XLA executes of it.
- `repeats` (repeats.py): equations that compute again what was computed already.
- collectives.py: the mesh axes of a collective, and its seconds. sources.py: an equation in words,
  with its line in the user's program.
- `Propagation` (propagation.py): labels that flow from arguments to results, through loops and
  branches.
- `peak` (lifetimes.py): the moment at which most bytes are alive. `scratch_bytes` (scratch.py):
  what kernels of other libraries allocate besides.
- `Graph` (graph.py): what makes and what reads each variable of one jaxpr. `Dependencies`
  (dependencies.py): what its equations wait for.

The names in `__all__` are public, for programs that look into what JAX traced.
"""

from collective_matmul.jaxprs.bodies import Body, bodies_of, called
from collective_matmul.jaxprs.lifetimes import Execution, last_reads, peak
from collective_matmul.jaxprs.propagation import Propagation
from collective_matmul.jaxprs.pullback import SplitPullback, split_pullback
from collective_matmul.jaxprs.scratch import scratch_bytes
from collective_matmul.jaxprs.walks import Scope

__all__ = [
    "Body",
    "Execution",
    "Propagation",
    "Scope",
    "SplitPullback",
    "bodies_of",
    "called",
    "last_reads",
    "peak",
    "scratch_bytes",
    "split_pullback",
]
