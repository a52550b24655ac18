"""Configurations: what a run is asked for, its defaults, and the checks that values fit together.

Flags and files enter; a checked `Config` and the sizes of its mesh leave. `config` has the fields,
`presets` and `defaults` their values, `checks` what fits. `experts`, `context` and `loss_chunks`
say what the settings of these parts mean on a mesh. Nothing here computes with arrays.
"""
