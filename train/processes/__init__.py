"""The processes of a run: how they find each other, what they agree on, and how they end.

Flags, the variables of a launcher and signals enter; connected processes leave, each with its own
GPUs. `launchers`, `supervisor` and `shutdown` import the standard library alone.
"""
