"""The code in README.md and PITFALLS.md runs, and says what it claims."""

import re

import numpy as np
import pytest
from cluster import ROOT


def _run(name):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(), flags=re.S)
    assert blocks
    names = {}
    for block in blocks:
        exec(compile(block, name, "exec"), names)
    return names


def test_readme_example_learns():
    names = _run("README.md")
    np.testing.assert_allclose(names["state"].params["w"], [1, 2, 3], atol=1e-3)


def test_every_pitfall_is_as_described():
    assert "refuses" in _run("PITFALLS.md")


@pytest.mark.parametrize("command", ["make demo", "make test"])
def test_readme_commands_exist(command):
    target = command.split()[1]
    assert f"    {command} " in (ROOT / "README.md").read_text()
    assert f"\n{target}:" in (ROOT / "Makefile").read_text()
