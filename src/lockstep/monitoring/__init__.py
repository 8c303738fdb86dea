"""Views of a run: they read its folder, and never take part in it."""
