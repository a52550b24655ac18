"""`overlap_jit`, and the decision whether a program's kernels may address the memory of peers.

In come functions of users and their arguments, which may hold nnx objects. Out go programs that
`jax.jit` compiles with the options of `xla_options`. The ops know what was decided by
`collective_matmul.peer_access`.
"""
