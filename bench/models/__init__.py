"""Models to measure with, by name: each the same in Keras 3, in tf_keras and, for some rows, in PyTorch."""

from models import cnn, dense, embedding, mlp, resnet, transformer
from models.model import LEARNING_RATE, Model, halves

COMPARED: dict[str, Model] = {
    "cnn": cnn.MODEL,
    "mlp": mlp.MODEL,
    "embedding": embedding.MODEL,
    "resnet": resnet.MODEL,
    "transformer": transformer.MODEL,
}
"""Those that are trained in other ways too."""
MODELS = COMPARED | dense.MODELS

__all__ = ["COMPARED", "LEARNING_RATE", "MODELS", "Model", "halves"]
