"""Runs functions of the script on replicas: `strategy.run` and `strategy.steps`; nothing of `fit`."""
