"""How processes that a user starts by hand find each other and become the workers of one job."""
