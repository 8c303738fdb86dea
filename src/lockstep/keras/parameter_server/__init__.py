"""`fit` in a job with parameter servers: servers have the weights, and gradients arrive at any time."""
