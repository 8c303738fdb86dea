"""Cross-validation in one script: a model for each of five folds, and the mean of their accuracies.

lockstep run -n 2 examples/k_fold.py
python examples/k_fold.py
"""

import keras
import numpy as np
from sklearn.datasets import load_breast_cancer
from sklearn.model_selection import StratifiedKFold

FOLDS, EPOCHS = 5, 15


def build_and_compile() -> keras.Model:
    model = keras.Sequential(
        [
            keras.layers.Dense(32, activation="relu"),
            keras.layers.Dropout(0.3),
            keras.layers.Dense(1, activation="sigmoid"),
        ]
    )
    model.compile(keras.optimizers.Adam(3e-3), "binary_crossentropy", metrics=["accuracy"])
    return model


def main() -> None:
    x, y = load_breast_cancer(return_X_y=True)
    accuracies = []
    folds = StratifiedKFold(FOLDS, shuffle=True, random_state=1).split(x, y)
    for number, (training, held_out) in enumerate(folds, 1):
        keras.utils.set_random_seed(number)
        mean, deviation = x[training].mean(axis=0), x[training].std(axis=0)
        scaled = ((x - mean) / deviation).astype("float32")
        history = build_and_compile().fit(
            scaled[training],
            y[training],
            batch_size=32,
            epochs=EPOCHS,
            validation_data=(scaled[held_out], y[held_out]),
            verbose=0,
        )
        accuracies.append(history.history["val_accuracy"][-1])
        print(f"fold {number}: accuracy {accuracies[-1]:.4f}")
    print(f"mean accuracy: {np.mean(accuracies):.4f}, standard deviation {np.std(accuracies):.4f}")


if __name__ == "__main__":
    main()
