"""What a run publishes of itself, and where that is written or shown; nothing that decides."""
