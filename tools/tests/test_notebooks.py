"""The notebooks are those of the guides, and run."""

import nbclient
import nbformat
import notebooks
import pytest


def test_they_are_those_of_the_guides() -> None:
    assert notebooks.main(["--check"]) == 0


def test_a_change_of_a_guide_is_noticed(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(notebooks, "OUT", tmp_path)
    assert notebooks.main(["--check"]) == 1
    assert "sharding.ipynb" in capsys.readouterr().out
    assert notebooks.main([]) == 0
    assert notebooks.main(["--check"]) == 0


def test_code_and_text_alternate() -> None:
    text = "# A\n\nSee [b](b.md).\n\n```python\nimport opt_core\n```\n\nEnd\n"
    cells = notebooks.convert("a", text)["cells"]
    assert [cell["source"] for cell in cells] == [
        "%pip install --quiet opt-core",
        "# A\n\nSee b.",
        "import opt_core",
        "End",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("guide", notebooks.GUIDES)
def test_they_run(guide: str) -> None:
    notebook = nbformat.read(notebooks.OUT / f"{guide}.ipynb", 4)  # type: ignore[no-untyped-call]
    nbformat.validate(notebook)
    nbclient.NotebookClient(notebook, timeout=300).execute()
