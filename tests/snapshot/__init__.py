"""Snapshots of what the library makes of a program, to show that a restructuring changes nothing.

``python -m tests.snapshot write FILE.json`` records four kinds of facts: the kernels that are
lowered for Hopper GPUs, the primitives in the jaxprs of all ops, the temporary memory of programs
compiled for H200, and the decisions for several thousand random calls. ``python -m tests.snapshot
compare OLD NEW`` prints what differs between two such files, and fails if anything does.

Nothing needs a GPU; only the memory needs JAX's CUDA build. Programs are written with the public
names of the library, so that the same tool runs before and after its internals have moved. The few
other names that it needs are imported by `tests.snapshot.library`. To record a tree that lacks this
tool, or has another version of it, put a folder in front of that tree on the path::

    mkdir -p overlay/tests
    ln -s TREE/tests/* overlay/tests/
    ln -sfn $PWD/tests/snapshot overlay/tests/snapshot
    cd overlay
    PYTHONPATH=$PWD:TREE python -m tests.snapshot write FILE.json
"""
