"""The public API: strategies."""
