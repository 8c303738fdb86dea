"""Models to measure with, by name: each the same in Keras 3, in tf_keras and, where a row needs it, in PyTorch."""

from models import cnn
from models.model import LEARNING_RATE, Model

MODELS: dict[str, Model] = {"cnn": cnn.MODEL}

__all__ = ["LEARNING_RATE", "MODELS", "Model"]
