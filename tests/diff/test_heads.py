"""How the programs of two runs differ, in the words of a program; the recordings are made by hand."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from lockstep.diff.heads import HeadDifference, head_differences
from lockstep.diff.recording import Recording
from lockstep.diff.wording import described
from lockstep.system.paths import RunPaths, kept_source

POLICY = (
    '{{"class_name": "DTypePolicy", "config": {{"name": "{}"}}, "module": "keras", "registered_name": null}}'
)
STOPPING = {"class": "EarlyStopping", "monitor": '"loss"', "patience": "3"}
PLATEAU = {"class": "ReduceLROnPlateau", "monitor": '"loss"', "patience": "5"}


def recording(settings: dict[str, str] | None = None, *, job: Any = None, **program: Any) -> Recording:
    made = Recording(Path("run"), job=job or {}, program=program)
    made.settings = {"fit 1": settings or {}}
    return made


def callbacks(*parameters: dict[str, str]) -> dict[str, str]:
    return {
        f"setting callback {number} ({own['class']}): {name}": text
        for number, own in enumerate(parameters)
        for name, text in own.items()
    }


def said(first: dict[str, str], second: dict[str, str]) -> list[str]:
    """Return what is said of two calls with these settings."""
    return [described(head) for head in head_differences(recording(first), recording(second))]


@pytest.mark.parametrize(
    ("first", "second", "text"),
    [
        (
            {"call batch size": "64", "order": "batches of 64, shuffle True, random states a"},
            {"call batch size": "65", "order": "batches of 65, shuffle True, random states b"},
            "batch_size of fit 1 is 64 in the first run and 65 in the second",
        ),
        (
            {"call shuffle": "True", "order": "batches of 64, shuffle True, random states a"},
            {"call shuffle": "False", "order": "batches of 64, shuffle False, seed ()"},
            "shuffle of fit 1 is True in the first run and False in the second",
        ),
        (
            callbacks(STOPPING, PLATEAU),
            callbacks(PLATEAU, STOPPING),
            "order of the callbacks of fit 1 is EarlyStopping, ReduceLROnPlateau in the first run and "
            "ReduceLROnPlateau, EarlyStopping in the second",
        ),
        (
            callbacks(STOPPING),
            callbacks(PLATEAU, STOPPING),
            "callbacks of fit 1 are EarlyStopping in the first run and ReduceLROnPlateau, EarlyStopping in "
            "the second",
        ),
        (
            callbacks(STOPPING, PLATEAU),
            callbacks(STOPPING | {"patience": "4"}, PLATEAU),
            "patience of callback EarlyStopping in fit 1 is 3 in the first run and 4 in the second",
        ),
        (
            {
                "setting layer dense 2: class": "Dense",
                "setting layer dense 2: dtype": POLICY.format("float32"),
            },
            {
                "setting layer dense 2: class": "Dense",
                "setting layer dense 2: dtype": POLICY.format("mixed_bfloat16"),
            },
            "dtype of layer dense 2 is float32 in the first run and mixed_bfloat16 in the second",
        ),
        (
            {"setting optimizer: class": "Adam", "setting optimizer: learning_rate": "0.009999999776482582"},
            {"setting optimizer: class": "Adam", "setting optimizer: learning_rate": "0.02"},
            "learning_rate of the optimizer of fit 1 is 0.01 in the first run and 0.02 in the second",
        ),
        (
            {"setting optimizer: class": "Adam", "setting optimizer: beta_1": "0.9"},
            {"setting optimizer: class": "SGD", "setting optimizer: momentum": "0.0"},
            "the optimizer of fit 1 is Adam in the first run and SGD in the second",
        ),
        (
            {},
            {"setting layer dropout: class": "Dropout", "setting layer dropout: rate": "0.5"},
            "layer dropout is absent in the first run and Dropout in the second",
        ),
        (
            {"setting loss": '"mse"'},
            {"setting loss": '{"class": "Huber", "code": "", "delta": 2.0, "name": "huber"}'},
            "the loss of fit 1 is mse in the first run and Huber(delta=2) in the second",
        ),
        (
            {"setting layer own: class": "Own", "setting layer own: code (Python 3.12)": f"{1:016x}"},
            {"setting layer own: class": "Own", "setting layer own: code (Python 3.12)": f"{2:016x}"},
            "code of layer own differs",
        ),
        (
            {"the seeds of the script": "7"},
            {"the seeds of the script": "8"},
            "the seeds of the script in fit 1 differ",
        ),
        (
            {"call epochs": "0 to 2"},
            {"call epochs": "0 to 3"},
            "epochs of fit 1 is 2 in the first run and 3 in the second",
        ),
        (
            {"call epochs": "0 to 3"},
            {"call epochs": "1 to 3"},
            "epochs of fit 1 is 0 to 3 in the first run and 1 to 3 in the second",
        ),
    ],
)
def test_one_difference_is_one_sentence(first: dict[str, str], second: dict[str, str], text: str) -> None:
    assert said(first, second) == [text]


def test_another_seed_of_the_job_is_no_other_seed_of_the_script() -> None:
    first, second = (recording({"the seeds of the script": str(seed)}, seed=seed) for seed in (7, 8))
    assert [described(head) for head in head_differences(first, second)] == [
        "seed is 7 in the first run and 8 in the second"
    ]


def test_of_a_long_value_the_part_that_differs_is_shown() -> None:
    config = {f"key_{number:02}": number for number in range(12)}
    other = {**config, "key_11": 12}
    (text,) = said(
        {"setting layer own: class": "Own", "setting layer own: options": json.dumps(config)},
        {"setting layer own: class": "Own", "setting layer own: options": json.dumps(other)},
    )
    assert text.startswith("options of layer own is ")
    assert "key_11: 11} in the first run and" in text
    assert text.endswith("key_11: 12} in the second")


def with_sources(folder: Path, **texts: str) -> Recording:
    """Return a recording with source files, which are kept in its folder."""
    script = Path("/home/me/train.py")
    sources = RunPaths(folder).sources
    sources.mkdir(parents=True)
    hashes = {}
    for name, text in texts.items():
        file = script.parent / f"{name}.py"
        kept_source(sources, file).write_text(text)
        hashes[f"{name}.py"] = hashlib.sha256(text.encode()).hexdigest()
    return Recording(folder, {"script": {"path": str(script)}}, {"sources": hashes, "script": "train.py"})


def differences(first: Recording, second: Recording) -> list[HeadDifference]:
    return list(head_differences(first, second))


def test_the_lines_that_differ_in_an_edited_module_are_named(tmp_path: Path) -> None:
    text = "import keras\n\nRATE = 0.5\n\ndef build():\n    return 1\n"
    first = with_sources(tmp_path / "a", train="import layers\n", layers=text)
    second = with_sources(tmp_path / "b", train="import layers\n", layers=text.replace("0.5", "0.4"))
    (module,) = differences(first, second)
    assert (module.cause, described(module)) == ("script", "module layers.py differs")
    assert module.lines == ("- 3: RATE = 0.5", "+ 3: RATE = 0.4")
    longer = with_sources(tmp_path / "c", train="\n".join(map(str, range(20))), layers=text)
    (script,) = differences(first, longer)
    assert script.name == "script"
    assert len(script.lines) == 1 + 7
    assert script.lines[-1] == "+ and 14 more lines"


def test_a_source_that_was_not_kept_or_has_changed_since_only_differs(tmp_path: Path) -> None:
    first = with_sources(tmp_path / "a", train="a = 1\n")
    second = with_sources(tmp_path / "b", train="a = 2\n")
    for file in RunPaths(tmp_path / "b").sources.iterdir():
        file.write_text("a = 3\n")
    (script,) = differences(first, second)
    assert (described(script), script.lines) == ("script differs", ())


@pytest.mark.parametrize(
    ("envs", "marks", "texts"),
    [
        (
            ({"RATE": "0.1"}, {"RATE": "0.2"}),
            ({"RATE": "aaaa"}, {"RATE": "bbbb"}),
            ["environment variable RATE is 0.1 in the first run and 0.2 in the second"],
        ),
        (
            ({}, {}),
            ({"RATE": "aaaa"}, {"RATE": "bbbb"}),
            ["environment variable RATE is set in the first run and set to another value in the second"],
        ),
        (
            ({"RATE": "0.1"}, {}),
            ({"RATE": "aaaa"}, {}),
            ["environment variable RATE is 0.1 in the first run and absent in the second"],
        ),
        (
            ({}, {}),
            ({}, {"RATE": "bbbb"}),
            ["environment variable RATE is absent in the first run and set in the second"],
        ),
        (
            ({"DATA": "/d"}, {}),
            ({}, {}),
            ["environment variable DATA is /d in the first run and not given in the second"],
        ),
        (
            ({"RATE": "0.1"}, {"RATE": None}),
            ({"RATE": "aaaa"}, {"RATE": "set"}),
            ["environment variable RATE is 0.1 in the first run and set to an unknown value in the second"],
        ),
        # The same value, once given and once set by the user.
        (({"RATE": "0.1"}, {}), ({"RATE": "aaaa"}, {"RATE": "aaaa"}), []),
        (({"A_TOKEN": None}, {"A_TOKEN": None}), ({"A_TOKEN": "set"}, {"A_TOKEN": "set"}), []),
        # An earlier version has not recorded them.
        (({}, {}), (None, {"RATE": "bbbb"}), []),
    ],
)
def test_environment_variables_have_their_names(envs: Any, marks: Any, texts: list[str]) -> None:
    made = [recording(job={"env": env}, variables=own) for env, own in zip(envs, marks, strict=True)]
    assert [described(head) for head in head_differences(*made)] == texts


def test_the_versions_of_packages_that_both_runs_import_are_compared() -> None:
    made = [recording(versions={"sklearn": sklearn, name: "1"}) for sklearn, name in (("1", "a"), ("2", "b"))]
    (head,) = head_differences(*made)
    assert described(head) == "version of sklearn is 1 in the first run and 2 in the second"
    assert head.cause == "versions"
