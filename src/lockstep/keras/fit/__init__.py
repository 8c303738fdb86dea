"""Replacements of methods of `keras.Model`, and the loops in them; `strategy.run` is elsewhere."""
