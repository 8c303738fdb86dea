"""Sums along one fixed tree, over several ways to move bytes."""
