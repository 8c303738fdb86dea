"""The models of the measurements, by name: the same in Keras 3, in tf_keras and, for some, in PyTorch."""

from models import cnn, deep, dense, embedding, mlp, resnet, transformer
from models.model import LEARNING_RATE, Model, halves

COMPARED: dict[str, Model] = {
    "cnn": cnn.MODEL,
    "mlp": mlp.MODEL,
    "embedding": embedding.MODEL,
    "resnet": resnet.MODEL,
    "transformer": transformer.MODEL,
}
"""The models that other programs train, too."""
MODELS = COMPARED | dense.MODELS | {"deep": deep.MODEL}

__all__ = ["COMPARED", "LEARNING_RATE", "MODELS", "Model", "halves"]
