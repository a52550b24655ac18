"""One process for each GPU."""
