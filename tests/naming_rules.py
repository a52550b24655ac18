"""Words that are not used as names in this repository, with the standard term for each.

A name is a module, folder, class, function, argument, variable or attribute that the repository
defines. It is split at underscores and capitals: `PeerBuffer` and `peer_buffer` are the words
"peer", "buffer".
"""

from __future__ import annotations

#: Words and sequences of words, in any name of any folder. A trailing "s" does not matter.
WORDS: dict[str, str] = {
    # Kernels.
    "meeting": "rendezvous",
    "await_all": "wait_for_peers",
    "say": "publish",
    "said": "mailbox, peer pointer",
    "hear": "poll",
    "heard": "polled",
    "twin": "peer buffer",
    "flag_word": "signal pad",
    "strip": "epilogue tile",
    "foreign": "remote",
    "own_tile": "local tile",
    "owned_tile": "local tile",
    "two_step": "two_shot",
    # Ops and dispatch.
    "bulk": "xla",
    "obstacle": "unsupported_reason",
    "why_not": "unsupported_reason",
    "rider": "co_gathered",
    "ride": "co_gathered",
    "riding": "co_gathered",
    "vary_together": "pvary_all",
    "listing": "table",
    "say_once": "warn_once",
    "stand_in": "alias",
    "traced_anew": "force_retrace",
    "ceiling": "compute_only",
    "nothing_communicated": "compute_only",
    "contender": "baseline, candidate",
    # Layers and rewrite.
    "find_world": "current_context",
    "nesting": "rewriter",
}

#: Of these, those that the name of a test may have, since it is a sentence.
ORDINARY_IN_SENTENCES = {"say", "hear", "strip", "ride", "stand_in", "two_step"}

_KERNEL_NAMES = {
    "choices": "to_json, candidates",
    "Shapes": "ProblemShape",
    "cut": "tiling",
    "cuts": "tilings",
    "turn": "tile_idx",
    "turns": "tile indices",
    "slot": "stage",
    "slots": "stages",
    "slice_": "k-block",
    "filled": "full",
    "consumed": "empty",
    "delays": "race_delays",
    "copying": "load",
    "multiplying": "mma",
    "flags": "signals",
}

#: Names as a whole, by the folder they are not used in. Elsewhere they may be ordinary words.
NAMES: dict[str, dict[str, str]] = {
    "collective_matmul": {
        "addresses.py": "peer_memory",
        "announce": "publish",
        "peers.py": "peer_memory",
        "plan.py": "config",
        "twins.py": "remote_store",
        "workspace.py": "symmetric_workspace",
        "source.py": "source_location",
        "Plan": "a name that says what is planned",
        "facts": "site attributes",
        "Kept": "Gathered",
        "Source": "SourceLocation",
        "way": "backend, direction",
        "ways": "backends, directions",
        "world": "ShardingContext",
        "worlds": "ShardingContext",
        "World": "ShardingContext",
        "Placed": "PlacedMatch",
        "Passage": "CommutingOp",
        "Launch": "GroupedWgrad",
        "Crossing": "cross-call residual forwarding",
        "Work": "PersistentGemm",
        "Gathering": "AllGatherGemm",
        "Scattering": "GemmReduceScatter",
        "OwnersWalk": "OwnerTileScheduler",
    },
    "collective_matmul/mosaic_gpu": _KERNEL_NAMES,
    "collective_matmul/backends": _KERNEL_NAMES,
    "collective_matmul/rewrite": {"Step": "ShardOp", "crossing": "residual forwarding"},
    "train": {"keep": "max_to_keep", "accumulate": "gradient_accumulation_steps"},
    "benchmarks": {"peers": "a name that says who they are: peers are GPUs"},
}

#: What may break a convention, and why: (check, path or folder, name).
EXCEPTIONS: dict[tuple[str, str, str], str] = {
    ("compared_backend_names", "collective_matmul/ops/matmul/fused/", "one_shot"): (
        "the kind of all-reduce in which every device computes the whole sum"
    ),
    ("compared_backend_names", "collective_matmul/jit/compiler.py", "fused"): (
        "the old name of the argument peer_kernels"
    ),
    ("compared_backend_names", "collective_matmul/mosaic_gpu/hopper_matmul/tiling.py", "xla"): (
        "XLA's matmul in a table of matmuls"
    ),
    ("home_made_names", "collective_matmul/ops/experts/backend.py", "Work"): (
        "a callback, the argument `work` of `walk_round_trip`, and no kernel"
    ),
    ("home_made_names", "collective_matmul/ops/experts/routing.py", "Plan"): (
        "its docstring says what is planned: the order of pairs of tokens and experts"
    ),
    **{
        ("repeated_names", "models/", name): "a block takes either module of layers by their names"
        for name in (
            "AttentionProjection",
            "ColumnParallelLinear",
            "GatedFeedForward",
            "RowParallelLinear",
        )
    },
}
