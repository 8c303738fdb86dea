"""How processes that a user starts by hand find each other and become workers of one job. No training."""
