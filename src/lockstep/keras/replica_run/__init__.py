"""Runs functions of the script on replicas: `strategy.run`, and loops that Lockstep drives."""
