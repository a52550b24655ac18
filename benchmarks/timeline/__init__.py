"""Where the time of a profile went: `python -m benchmarks.timeline TRACE_DIRECTORY`."""
