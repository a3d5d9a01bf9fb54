"""The code in the documentation runs as it is printed."""

import json
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"


def blocks(page):
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)


def test_the_worked_drafter_runs():
    names: dict = {}
    for number, block in enumerate(blocks("add_a_drafter.md")):
        exec(compile(block, f"add_a_drafter.md, block {number}", "exec"), names)  # noqa: S102
    assert names["out"].stats.accepted > 0


def test_files_named_in_the_pages_exist():
    root = DOCS.parent
    for page in sorted(DOCS.glob("*.md")):
        text = page.read_text()
        for path in re.findall(
            r"`((?:jspec|tests|experiments|docs)/[\w/.]+\.\w+)`", text
        ):
            assert (root / path).is_file(), f"{page.name} names {path}"


@pytest.mark.slow
def test_the_quickstart_runs():
    notebook = json.loads((DOCS / "quickstart.ipynb").read_text())
    names: dict = {}
    for number, cell in enumerate(notebook["cells"]):
        if cell["cell_type"] == "code":
            source = "".join(cell["source"])
            exec(compile(source, f"quickstart, cell {number}", "exec"), names)  # noqa: S102
    assert names["out"].stats.accepted > 0
