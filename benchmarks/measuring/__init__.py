"""Shared by all benchmarks: settings, the machine, reports and their tables, profiles."""
