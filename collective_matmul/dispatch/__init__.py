"""The choice of a backend for each request, by tables and predictions, and a record of decisions.

The input is the request of an op. The outputs are the backend that executes it, and a `Decision`
for programs that record.

- contract: requests and backends. registry: ops and backends by name. selection: the choice.
- assessment: the answers of all backends. tables/: measured times.
- recording, run_counts, decision_table: decisions, how often each runs, and their table.
- repetitions: programs that measure a request. branches: axes on which devices may disagree.
"""
