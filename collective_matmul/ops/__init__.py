"""The ops: a folder for each family, with its functions, requests, gradients and backends."""
