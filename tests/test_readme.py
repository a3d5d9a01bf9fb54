"""The README's example runs as it is printed."""

import re
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"


@pytest.mark.slow
def test_the_example_runs(capsys):
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    names: dict = {}
    exec(compile(example, str(README), "exec"), names)  # noqa: S102
    assert names["out"].finish_reason == ["eos"]
    assert "to be or not to be" in capsys.readouterr().out.lower()
