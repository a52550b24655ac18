"""Matmuls whose communication is hidden under them: the ops, their requests and backends."""
