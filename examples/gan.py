"""Two models that train against each other: a GAN that draws handwritten digits.

    lockstep run -n 2 examples/gan.py

Each of the two updates is a step of its own compiled model, which works on every backend: the discriminator
learns to distinguish drawings from digits, and `adversary`, the generator followed by the frozen
discriminator, learns to draw digits that the discriminator accepts.
"""

import keras
import numpy as np

import lockstep
from digits import load_digits

NOISE = 32
BATCH = 64
STEPS = 600

layers = keras.layers


def build_generator() -> keras.Model:
    return keras.Sequential(
        [
            layers.Input((NOISE,)),
            layers.Dense(128),
            layers.LeakyReLU(0.2),
            layers.Dense(784, activation="sigmoid"),
            layers.Reshape((28, 28)),
        ],
        name="generator",
    )


def build_discriminator() -> keras.Model:
    return keras.Sequential(
        [
            layers.Input((28, 28)),
            layers.Flatten(),
            layers.Dense(128),
            layers.LeakyReLU(0.2),
            layers.Dropout(0.3),
            layers.Dense(1),
        ],
        name="discriminator",
    )


def compile_for_logits(model: keras.Model) -> None:
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    model.compile(optimizer=keras.optimizers.Adam(5e-4, beta_1=0.5), loss=loss)


def main() -> None:
    strategy = lockstep.MultiWorkerMirroredStrategy()
    (images, _), _ = load_digits()
    with strategy.scope():
        generator, discriminator = build_generator(), build_discriminator()
        adversary = keras.Sequential([generator, discriminator], name="adversary")
        compile_for_logits(discriminator)
        compile_for_logits(adversary)

    # Every worker draws the same numbers, since each one sees the whole batch.
    random = np.random.default_rng(0)
    for step in range(STEPS):
        noise = random.normal(size=(BATCH, NOISE)).astype("float32")
        drawn = keras.ops.convert_to_numpy(generator(noise))
        real = images[random.choice(len(images), BATCH, replace=False)]
        both = np.concatenate([real, drawn])
        labels = np.repeat([[0.9], [0.0]], BATCH, axis=0).astype("float32")
        # Keras trains the variables that are trainable now: in the second step, only the generator's.
        discriminator.trainable = True
        told_apart = discriminator.train_on_batch(both, labels)
        discriminator.trainable = False
        taken = adversary.train_on_batch(noise, np.ones((BATCH, 1), "float32"))
        if step % 100 == 99:
            print(f"step {step + 1}: discriminator {float(told_apart):.3f}, generator {float(taken):.3f}")

    noise = random.normal(size=(256, NOISE)).astype("float32")
    average = keras.ops.convert_to_numpy(generator(noise)).mean(axis=0)
    likeness = np.corrcoef(average.ravel(), images.mean(axis=0).ravel())[0, 1]
    print(f"likeness of the average drawing to the average digit: {likeness:.4f}")
    print(f"digest: {lockstep.digest(adversary)}")


if __name__ == "__main__":
    main()
