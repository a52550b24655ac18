"""The choice of a backend for each site, by tables and predictions, and a record of decisions.

In comes the request of an op. `selection` asks the op's backends and `tables/`; out go the backend
that executes it, and a `Decision` for whoever records.
"""
