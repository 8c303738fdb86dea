"""Runs functions of the script on replicas: `strategy.run` and `strategy.steps`. It does not know `fit`."""
