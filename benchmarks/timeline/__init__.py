"""Shows how the time of a profile was spent: `python -m benchmarks.timeline TRACE_DIRECTORY`."""
