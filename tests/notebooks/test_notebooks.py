"""The notebooks run from their first cell to their last, on a small budget."""

import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = [
    pytest.param(path, marks=() if path.stem == "quickstart" else pytest.mark.slow, id=path.stem)
    for path in sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))
]

# What each notebook's last command writes: a shell command that fails does not fail its cell.
LAST_FILE = {"quickstart": "evaluation.png", "scheduling": "served.jsonl", "trees": "tree.png"}


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("path", NOTEBOOKS)
def test_notebook_runs(path, tmp_path, monkeypatch):
    monkeypatch.setenv("QUICKSTART_STEPS", "4")
    monkeypatch.setenv("QUICKSTART_PROMPTS", "12")
    monkeypatch.setenv("TREES_HELD_OUT", "1")
    monkeypatch.setenv("SCHEDULING_SLOTS", "2")
    monkeypatch.setenv("SCHEDULING_REQUESTS", "16")
    monkeypatch.setenv("QUICKSTART_FOLDER", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(path.parents[1]))
    notebook = nbformat.read(path, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "commit notebooks without outputs"
    notebook.metadata.kernelspec = {"name": "python3", "display_name": sys.executable, "language": "python"}
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": tmp_path}}).execute()
    assert (tmp_path / LAST_FILE[path.stem]).exists()
