"""What holds for the package as a whole: cheap to import, documented, clean."""

import ast
import pathlib
import re
import subprocess
import sys
import tomllib

import pytest

import jdp

ROOT = pathlib.Path(__file__).parents[1]
MODULES = sorted((ROOT / "jdp").rglob("*.py"))
SOURCES = sorted(
    path
    for folder in ("jdp", "tests", "examples", "benchmarks", "notebooks")
    for pattern in ("*.py", "*.ipynb")
    for path in (ROOT / folder).rglob(pattern)
    if ".ipynb_checkpoints" not in path.parts
)


def in_new_process(code):
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_jdp_starts_no_backend():
    # A backend that has started can be given no more devices, and no other processes.
    out = in_new_process(
        "import jdp\n"
        "from jax._src import xla_bridge\n"
        "print('started:', xla_bridge.backends_are_initialized())\n"
        "import jax\n"
        "jax.config.update('jax_num_cpu_devices', 3)\n"
        "jax.config.update('jax_platforms', 'cpu')\n"
        "print('devices:', len(jax.devices()))\n"
    )
    assert out.split("\n")[:2] == ["started: False", "devices: 3"]


def test_importing_jdp_imports_little_beyond_jax_and_optax():
    out = in_new_process(
        "import sys, jax, optax\n"
        "before = set(sys.modules)\n"
        "import jdp\n"
        "print(*sorted({name.split('.')[0] for name in set(sys.modules) - before}))\n"
    )
    third_party = set(out.split()) - set(sys.stdlib_module_names) - {"jdp", "jax", "jaxlib"}
    assert third_party == set()


def test_every_public_name_is_exported_and_documented():
    for name in jdp.__all__:
        assert getattr(jdp, name).__doc__, f"jdp.{name} has no docstring"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.name)
def test_module_has_a_docstring_and_a_readable_size(path):
    text = path.read_text()
    assert ast.get_docstring(ast.parse(text)), f"{path.name} does not say what it is for"
    assert len(text.splitlines()) <= 400, f"{path.name} holds more than one idea: split it"


@pytest.mark.parametrize("pattern", [r"check_vma\s*=\s*False", r"\b(TODO|FIXME|XXX)\b"])
def test_nowhere_in_the_sources(pattern):
    here = pathlib.Path(__file__)
    found = [p.name for p in SOURCES if p != here and re.search(pattern, p.read_text())]
    assert found == []


def test_version_is_in_the_changelog():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"## [{project['version']}]" in (ROOT / "CHANGELOG.md").read_text()
