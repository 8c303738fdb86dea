"""What a run publishes of itself, and where that is written; nothing that decides."""
