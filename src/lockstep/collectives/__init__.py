"""The exchange of a view: sums along one fixed tree, and its implementations. It does not know training."""
