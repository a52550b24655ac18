"""The choice of a backend for each site, by tables and predictions, and a record of decisions."""
