"""Which backend executes a site: tables and predictions compared, and a record of decisions."""
