"""Single ops, and layers of each kind, with their references."""
