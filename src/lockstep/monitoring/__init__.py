"""Programs that show a run: they read its folder, and never take part in the run."""
