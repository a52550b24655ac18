"""The memory of a run: a traced step enters, and the bytes per device leave, with advice to fit.

`device_memory` has what JAX may use of a GPU, `live_memory` the bytes of a program from its jaxpr.
`train.plan` predicts memory without tracing.
"""
