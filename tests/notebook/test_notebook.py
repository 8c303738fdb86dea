"""The notebook of the examples runs with the results that it describes."""

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest

NOTEBOOK = Path(__file__).parents[2] / "examples" / "multi_worker.ipynb"


def shown(cell: Any) -> str:
    """Return the output and the value of a cell."""
    texts = [out.get("text", out.get("data", {}).get("text/plain", "")) for out in cell.get("outputs", ())]
    return "".join(texts)


@pytest.mark.slow
@pytest.mark.usefixtures("_compiled_once")
def test_the_notebook_shows_equal_digests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(folder, str(tmp_path / "jupyter"))
    # The kernel is from IPython, the images are from scikit-learn.
    monkeypatch.setenv("HIDDEN_PACKAGES", "tensorflow,torch")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    place = tmp_path / "place"
    place.mkdir()
    notebook = nbformat.read(shutil.copy(NOTEBOOK, place), as_version=4)
    nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(place)}}).execute()
    output = "\n".join(map(shown, notebook.cells))
    assert "'index': 0" in output
    assert "the loss falls: True" in output
    assert output.count("\nfrom-the-notebook/worker-") == output.count("\nfrom-the-script/worker-") == 2
    assert output.endswith("equal to the last bit: True\n")
