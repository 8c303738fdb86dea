"""The input of calls on models as global batches, and the batch to build a model with."""

from collections.abc import Iterator, Mapping
from typing import Any

import keras

from lockstep.errors import DataError
from lockstep.keras.backends.contract import StepKind
from lockstep.keras.input.distributed_dataset import DistributedDataset
from lockstep.keras.input.distribution import explain_sharding
from lockstep.keras.input.fit_inputs import GlobalInput, global_input, split_validation
from lockstep.keras.input.held_state import states_held
from lockstep.keras.input.readings import ReadingWorker, explain_reading
from lockstep.keras.input.sources import GlobalBatchSource
from lockstep.keras.input.visits import NO_EXAMPLES, order_seed
from lockstep.keras.numbered_calls import NumberedCall, NumberedCalls
from lockstep.keras.private.common import layers_of
from lockstep.keras.randomness import is_in_variable
from lockstep.keras.seeds import seed_of
from lockstep.keras.state.snapshots import Snapshots
from lockstep.worker.job import Job


class CallInputs:
    """Makes the inputs of a process's calls.

    Args:
        job: the job of the process.
        calls: the calls of the process.
        snapshots: the snapshots of the process.
    """

    def __init__(self, job: Job, calls: NumberedCalls, snapshots: Snapshots) -> None:
        self._job = job
        self._calls = calls
        self._models, self._resumable = snapshots.models, snapshots.resumable

    def note_held(self, call: NumberedCall, model: Any, x: Any, validation: Any = None) -> None:
        """Note the states that reading changes in the inputs of a script's call: they are part of the state.

        State that the model holds is part of the model's state. Only the script's own calls are resumed.
        """
        if len(self._calls.stack) == 2:
            variables = {id(variable) for variable in model.variables}
            call.held, call.held_by_validation = (
                {
                    path: held
                    for path, held in states_held((name, _dataset_of(data))).items()
                    if not (is_in_variable(held) and id(held.state) in variables)
                }
                for name, data in (("x", x), ("validation_data", validation))
            )

    def of_training(self, arguments: Mapping[str, Any]) -> tuple[GlobalInput, Any]:
        """Return the training input of a `fit` with these arguments, and its validation data."""
        x, y, weight, validation = (arguments[key] for key in ("x", "y", "sample_weight", "validation_data"))
        if validation is None and arguments["validation_split"]:
            (x, y, weight), validation = split_validation(x, y, weight, arguments["validation_split"])
        training = self.of_call(
            x,
            y,
            weight,
            batch_size=arguments["batch_size"],
            steps=arguments["steps_per_epoch"],
            shuffle=arguments["shuffle"],
            class_weight=arguments["class_weight"],
        )
        refuse_empty(training)
        return training, validation

    def of_validation(self, arguments: Mapping[str, Any], validation: Any) -> GlobalInput:
        """Return the input of the validations of a `fit` with these arguments."""
        x, y, weight = keras.utils.unpack_x_y_sample_weight(validation)
        batch_size = arguments["validation_batch_size"] or arguments["batch_size"]
        # A joiner does not begin validations before it joins, so it could not number passes over shards.
        options = {"batch_size": batch_size, "steps": arguments["validation_steps"], "in_order": True}
        return self.of_call(x, y, weight, **options)

    def of_call(self, x: Any, y: Any = None, sample_weight: Any = None, **options: Any) -> GlobalInput:
        """Return the input of the call in progress, whose batches replicas share if there are several."""
        unsplit = self._job.view.replicas == 1
        if not unsplit:
            explain_sharding(self._job, x)
        call = self._calls.current
        order = order_seed(self._job.settings.seed, call.number)
        reader = ReadingWorker(
            self._job,
            seed_of(call.seed, call.number),
            joint=self._job.settings.joint_input,
            call=lambda: self._calls.current.number,
        )
        options.setdefault("shuffle", False)
        data = global_input(x, y, sample_weight, **options, seed=order, unsplit=unsplit, reader=reader)
        if not unsplit:
            explain_reading(self._job, data.way)
        return data

    def sample(self, data: GlobalInput, model: Any, kind: StepKind) -> Any:
        """Return a batch to build a model with, read from the data as Keras reads one.

        Reading draws random numbers, so either all processes do it here or none.
        """
        was_built = self._models.awaits(model) or self._models.was_built(model, kind)
        if keras.backend.backend() == "tensorflow" or was_built or not self._resumable.may_sample:
            return data.peek()
        self._calls.current.samples += 1
        data.on_epoch_begin()
        return data.first()

    def build_to_predict(self, data: GlobalInput, model: Any) -> None:
        """Build a model to predict, as Keras does before it reads the first batch of `data`."""
        on_jax = keras.backend.backend() == "jax"
        self._models.build(
            model, "predict", lambda: self.sample(data, model, "predict") if on_jax else data.peek()
        )
        if on_jax:
            # While a layer is not built, Keras first calls the model on a batch of its own.
            data.plain_first = not all(layer.built for layer in layers_of(model))

    def first_of(self, data: GlobalInput, model: Any) -> Iterator[tuple[int, int, list[Any]]]:
        """Yield the first batch as Keras's epoch iterators do. It is read only when it is needed.

        Keras asks again if the program's own `compute_loss` does not call the compiled loss.
        """
        yield 0, 0, [data.peek() if self._calls.current.samples else self.sample(data, model, "train")]


def refuse_empty(data: GlobalInput) -> None:
    """Refuse an input that is known to have no examples. Keras accepts only validation data without any.

    Raises:
        DataError: the input has no examples.
    """
    if data.known_batches == 0:
        raise DataError(NO_EXAMPLES)


def _dataset_of(data: Any) -> Any:
    """Return `data`, or the dataset from which it was distributed; None if each replica has a pipeline."""
    if not isinstance(data, DistributedDataset):
        return data
    return data.source.stream.dataset if isinstance(data.source, GlobalBatchSource) else None
