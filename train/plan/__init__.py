"""The plan of a run: predicted step time and memory of every configuration of a machine.

Everything is arithmetic on shapes; nothing is traced. `rates` has what was measured of each kind of
GPU, `shapes` the sizes of a device's arrays, `step_time` and `memory_estimate` the two predictions,
`candidates` the configurations, `what_fits` what to change where none fits, and `table` what is
printed.
"""
