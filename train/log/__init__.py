"""The log of a run: times and losses enter, and lines on the console, in files and trackers leave.

`metrics` has the fields of a line and the formula of model FLOPs, `reporter` passes lines to their
writers: `log_file` and `trackers`. `run_record` describes the run.
"""
