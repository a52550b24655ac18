"""What all benchmarks share: settings, the machine, reports and their tables, profiles."""
