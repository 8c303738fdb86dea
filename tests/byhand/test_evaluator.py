"""An evaluator, a chief and a worker that run the same script."""

import ast
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "evaluator.py"
PROGRAM = Path(__file__).parent / "evaluating.py"


def printed(text: str, mark: str) -> Any:
    (line,) = [line for line in text.splitlines() if line.startswith(mark)]
    return ast.literal_eval(line.removeprefix(mark))


@pytest.mark.slow
def test_an_evaluator_evaluates_what_a_chief_and_a_worker_train(
    host: Any, environment: dict[str, str], lean: Callable[..., dict[str, str]]
) -> None:
    def start(config: Any, program: Path, *arguments: str) -> Any:
        variables = environment | {"KERAS_BACKEND": "jax"} | lean(program, "jax")
        return host.start(config, str(program), "saved", *arguments, **variables)

    cluster = {
        kind: [f"127.0.0.1:{port}"] for kind, port in zip(("chief", "worker"), host.ports, strict=False)
    }
    evaluator, *trainers = [
        start(host.config(0, kind=kind, **cluster), EXAMPLE, "--epochs", "5")
        for kind in ("evaluator", "chief", "worker")
    ]
    for terminal in trainers:
        assert "step " not in terminal.end().replace("step-", "")
    text = evaluator.end()
    assert "loss: " in trainers[0].text
    assert f"waits for a job that saves checkpoints in {host.folder / 'saved'}" in text
    assert "restarts the script" not in text
    alone = json.loads(start(None, PROGRAM).end().splitlines()[-1])
    steps, figures = printed(text, "steps: "), printed(text, "figures: ")
    newest = max(int(path.name.removeprefix("step-")) for path in (host.folder / "saved").glob("step-*"))
    assert steps[-1] == newest == alone["step"]
    assert text.count("\nstep ") == len(steps)
    assert figures["val_accuracy"][-1] > 0.85
    assert {name: values[-1:] for name, values in figures.items()} == alone["plain"] == alone["sidecar"]
    assert alone["evaluates alone"]
    assert alone["predicts alone"] == [360, 10]
    assert alone["saves alone"]
    assert alone["chief"] is False
    assert alone["replicas"] == 1
