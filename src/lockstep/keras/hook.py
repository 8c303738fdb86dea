"""Where Lockstep meets the user's program: the methods of `keras.Model` that a job distributes.

A model that is compiled in a strategy's scope is adopted: its steps are computed by the job's replicas.
Everything else of Keras's own loops (callbacks, logs, epochs) stays Keras's.
"""

import functools
import inspect
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import keras

from lockstep.data.batch import GlobalBatch
from lockstep.errors import BackendError, ScopeError
from lockstep.job import Job
from lockstep.keras.agreement import agree
from lockstep.keras.callbacks import following
from lockstep.keras.calls import Call, Calls
from lockstep.keras.contract import Backend, Kind
from lockstep.keras.digest import named_arrays
from lockstep.keras.exchange import Exchange, state_facts
from lockstep.keras.files import write_together
from lockstep.keras.inputs import GlobalInput, global_input, split_validation, whole_batch

Original = Callable[..., Any]

_FUNCTIONS: dict[str, Kind] = {
    "make_train_function": "train",
    "make_test_function": "test",
    "make_predict_function": "predict",
}


class Hook:
    """The distributed calls of one process.

    Attributes:
        depth: how many strategy scopes the program is in.
    """

    def __init__(self, job: Job, backend: Backend) -> None:
        self._job = job
        self._backend = backend
        self._adopted: weakref.WeakSet[Any] = weakref.WeakSet()
        self._calls = Calls()
        self.depth = 0

    @property
    def alone(self) -> bool:
        """Whether there is one replica: Keras's own step is then the whole step."""
        return self._job.view.replicas == 1

    def compile(self, original: Original, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Adopt a model that is compiled in the strategy's scope."""
        result = original(model, *args, **kwargs)
        if self.depth:
            self._adopted.add(model)
        return result

    def fit(self, original: Original, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Train on global batches in the job's order."""
        if model not in self._adopted:
            self._refuse_outsider(model)
            return original(model, *args, **kwargs)
        bound = _bind(original, model, args, kwargs)
        given = bound.arguments
        with self._calls.enter("fit") as call:
            training, validation = self._fit_inputs(given)
            self._build(model, training)
            facts = {"call epochs": f"{given['initial_epoch']} to {given['epochs']}"} | training.facts()
            self._begin(call, model, facts)
            given.update(x=training, y=None, sample_weight=None, class_weight=None)
            given.update(validation_data=validation, validation_split=0.0)
            given.update(verbose=self._verbose(given["verbose"]))
            if not self._job.is_chief:
                given.update(callbacks=following(given["callbacks"]))
            return original(*bound.args, **bound.kwargs)

    def evaluate(self, original: Original, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Evaluate on global batches; every worker returns the global figures."""
        if model not in self._adopted or self.alone:
            return original(model, *args, **kwargs)
        if kwargs.get("_use_cached_eval_dataset"):
            with self._calls.enter("validation") as call:
                self._begin(call, model, {})
                return original(model, *args, **kwargs)
        bound = _bind(original, model, args, kwargs)
        given = bound.arguments
        with self._calls.enter("evaluate") as call:
            data = self._input(
                given["x"],
                given["y"],
                given["sample_weight"],
                batch_size=given["batch_size"],
                steps=given["steps"],
            )
            self._build(model, data)
            self._begin(call, model, data.facts())
            given.update(x=data, y=None, sample_weight=None, verbose=self._verbose(given["verbose"]))
            return original(*bound.args, **bound.kwargs)

    def predict(self, original: Original, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Predict on global batches; every worker returns all rows, in their order."""
        if model not in self._adopted or self.alone:
            return original(model, *args, **kwargs)
        bound = _bind(original, model, args, kwargs)
        given = bound.arguments
        with self._calls.enter("predict") as call:
            data = self._input(given["x"], batch_size=given["batch_size"], steps=given["steps"])
            if not model.built:
                with keras.StatelessScope():
                    model(keras.utils.unpack_x_y_sample_weight(data.first())[0])
            self._begin(call, model, data.facts())
            given.update(x=data, verbose=self._verbose(given["verbose"]))
            return original(*bound.args, **bound.kwargs)

    def save(self, original: Original, model: Any, filepath: Any, *args: Any, **kwargs: Any) -> None:
        """Save in whichever way `original` does: one worker writes, all wait until the file is there."""
        if len(self._job.view.workers) == 1:
            original(model, filepath, *args, **kwargs)
            return
        options = _bind(original, model, (filepath, *args), kwargs).arguments
        write_together(
            self._job,
            filepath,
            lambda path: original(model, path, *args, **kwargs),
            method=original.__name__,
            # Shards are several files; and what must not be overwritten has to be seen by Keras.
            rename=bool(options.get("overwrite", True)) and not options.get("max_shard_size"),
        )

    def make_function(self, name: str, original: Original, model: Any, force: bool = False) -> Any:
        """Give an adopted model the function that its loop calls for each step."""
        kind = _FUNCTIONS[name]
        attribute = f"{kind}_function"
        if model not in self._adopted or self.alone:
            return original(model, force)
        if getattr(model, attribute) is None or force:
            exchange = Exchange(self._job, self._backend, self._backend.program(model, kind), self._calls)
            take = exchange.predict if kind == "predict" else exchange.advance

            def step(state: Any, batch: Any) -> tuple[Any, Any]:
                return take(state, batch if isinstance(batch, GlobalBatch) else whole_batch(batch))

            setattr(model, attribute, self._backend.function(model, step, kind))
        return getattr(model, attribute)

    def _fit_inputs(self, given: dict[str, Any]) -> tuple[GlobalInput, Any]:
        x, y, weight = given["x"], given["y"], given["sample_weight"]
        validation = given["validation_data"]
        if validation is None and given["validation_split"]:
            (x, y, weight), validation = split_validation(x, y, weight, given["validation_split"])
        training = self._input(
            x,
            y,
            weight,
            batch_size=given["batch_size"],
            steps=given["steps_per_epoch"],
            shuffle=given["shuffle"],
            class_weight=given["class_weight"],
        )
        if validation is None or self.alone:
            return training, validation
        x, y, weight = keras.utils.unpack_x_y_sample_weight(validation)
        batch_size = given["validation_batch_size"] or given["batch_size"]
        return training, self._input(x, y, weight, batch_size=batch_size, steps=given["validation_steps"])

    def _input(self, x: Any, y: Any = None, sample_weight: Any = None, **options: Any) -> GlobalInput:
        script_seed = keras.utils.get_random_seed() if hasattr(keras.utils, "get_random_seed") else None
        seed = (self._job.seed, script_seed or 0, sum(self._calls.numbers.values()))
        options.setdefault("shuffle", False)
        return global_input(x, y, sample_weight, **options, seed=seed, joint=self.alone)

    def _build(self, model: Any, data: GlobalInput) -> None:
        """Create the variables of a model that were left for its first batch."""

        def batches() -> Iterator[tuple[int, int, list[Any]]]:
            yield 0, 0, [data.first()]

        model._symbolic_build(iterator=batches())

    def _begin(self, call: Call, model: Any, facts: dict[str, str]) -> None:
        """Make sure that all workers begin the same call with the same model; say that it begins."""
        self._job.report("call", name=call.name)
        if len(self._job.view.workers) == 1:
            return
        variables = [*model.variables, *(model.optimizer.variables if model.optimizer else [])]
        state = named_arrays(variables, [variable.value for variable in variables])
        agree(self._job, call.name, {"call": call.name} | facts | state_facts(self._backend, state))

    def _verbose(self, verbose: Any) -> Any:
        return verbose if self._job.is_chief else 0

    def _refuse_outsider(self, model: Any) -> None:
        if not self.alone:
            raise ScopeError(
                f"model {model.name!r} was not compiled in the strategy's scope, so each of the "
                f"{self._job.view.replicas} replicas would train a model of its own; build and compile it "
                "under `with strategy.scope():`"
            )


_installed: list[Hook] = []


def install(job: Job) -> Hook:
    """Put the hook for `job` into `keras.Model`, once a process; return it.

    Raises:
        BackendError: Keras runs on a backend that Lockstep does not support.
    """
    if not _installed:
        hook = Hook(job, _backend())
        for name in ("compile", "fit", "evaluate", "predict"):
            _replace(name, getattr(hook, name))
        for name in ("save", "save_weights", "export"):
            _replace(name, hook.save)
        for name in _FUNCTIONS:
            _replace(name, functools.partial(hook.make_function, name))
        _installed.append(hook)
        job.report("strategy", backend=keras.backend.backend())
    return _installed[0]


def _replace(name: str, method: Callable[..., Any]) -> None:
    original = getattr(keras.Model, name)

    @functools.wraps(original)
    def replacement(self: Any, *args: Any, **kwargs: Any) -> Any:
        return method(original, self, *args, **kwargs)

    setattr(keras.Model, name, replacement)


def _backend() -> Backend:
    name = keras.backend.backend()
    if name == "jax":
        from lockstep.keras.jax import JaxBackend

        return JaxBackend()
    if name == "tensorflow":
        from lockstep.keras.tensorflow import TensorFlowBackend

        return TensorFlowBackend()
    if name == "torch":
        from lockstep.keras.torch import TorchBackend

        return TorchBackend()
    raise BackendError(
        f"Keras runs on {name!r}, and Lockstep trains on 'jax' and 'tensorflow' only so far; set "
        "KERAS_BACKEND=jax, or start the script with `lockstep run --backend jax`"
    )


def _bind(original: Original, model: Any, args: Any, kwargs: Any) -> inspect.BoundArguments:
    bound = inspect.signature(original).bind(model, *args, **kwargs)
    bound.apply_defaults()
    return bound
