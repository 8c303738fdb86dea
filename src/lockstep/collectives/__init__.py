"""Sums along one fixed tree, with interchangeable transports."""
