"""Chat templates: conversations as text and as tokens."""
