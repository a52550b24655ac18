"""`overlap_jit`, and the decision whether a program's kernels may address the memory of peers.

The input is a user's function and its arguments, which may hold nnx objects. The output is a
program that `jax.jit` compiles with the options of `xla_options`. The ops read the decision from
`collective_matmul.peer_access`.

- compiler: `overlap_jit`. graph_functions: functions of nnx objects as functions of arrays.
- deciding_function: traces a function and asks for the decision. peer_decision: compares gain and
  cost. compiler_sharding: for which operations XLA may add collectives. compiler_causes: these in
  words, and their time.
"""
