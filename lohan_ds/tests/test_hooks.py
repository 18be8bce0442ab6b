"""Post-import hooks: any order of imports, once, and harmless when they fail. Run in fresh interpreters."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run(tmp_path):
    """Run code in a new Python that finds a few toy modules, and return its lines of output."""
    package = tmp_path / "toy"
    package.mkdir()
    (package / "__init__.py").write_text("import toy.engine\n")
    (package / "engine.py").write_text("class Engine:\n    name = 'stock'\n")
    (package / "half.py").write_text("install()\nclass Half:\n    name = 'stock'\n")
    (package / "other.py").write_text("")
    (tmp_path / "patches.py").write_text(
        "calls = []\n"
        "def engine(module):\n    calls.append(module.__name__)\n    module.Engine.name = 'ours'\n"
        "def half(module):\n    module.Half.name = 'ours'\n"
        "def broken(module):\n    raise KeyError('no such class')\n"
    )
    config = tmp_path / "deepspeed" / "runtime" / "config.py"
    config.parent.mkdir(parents=True)
    config.write_text("class DeepSpeedConfig:\n    def __init__(self, config):\n        self._param_dict = config\n")
    for folder in (config.parent, config.parent.parent):
        (folder / "__init__.py").write_text("")

    def run_code(code: str, **env: str) -> list[str]:
        start = "import sys\nfrom lohan_ds.integrations import hooks\nTABLE = {'toy.engine': 'patches:engine'}\n"
        result = subprocess.run(
            [sys.executable, "-c", start + code],
            env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", **env},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert result.returncode == 0, result.stderr
        return (result.stdout + result.stderr).splitlines()

    return run_code


def test_patches_a_module_imported_later(run):
    assert run("hooks.install(TABLE)\nimport toy.engine\nprint(toy.engine.Engine.name)") == ["ours"]


def test_patches_a_module_imported_before(run):
    assert run("import toy.engine\nhooks.install(TABLE)\nprint(toy.engine.Engine.name)") == ["ours"]


def test_patches_only_once(run):
    code = "hooks.install(TABLE)\nhooks.install(TABLE)\nimport toy\nhooks.install(dict(TABLE))\nimport toy.other\n"
    assert run(code + "import patches\nprint(patches.calls)") == ["['toy.engine']"]


def test_importing_the_package_again_adds_no_finder(run):
    code = "import importlib, lohan_ds\nbefore = len(sys.meta_path)\nimportlib.reload(lohan_ds)\n"
    assert run(code + "print(len(sys.meta_path) - before)") == ["0"]


def test_a_half_imported_module_is_patched_when_it_is_whole(run):
    code = (
        "import builtins\nbuiltins.install = lambda: hooks.install({'toy.half': 'patches:half'})\n"
        "import toy.half\nimport toy.other\nprint(toy.half.Half.name)"
    )
    assert run(code) == ["ours"]


def test_the_patched_module_keeps_its_own_loader(run):
    code = "hooks.install(TABLE)\nimport toy.engine\nimport inspect\n"
    code += "print(type(toy.engine.__spec__.loader).__name__, inspect.getsource(toy.engine.Engine).split()[0])"
    assert run(code) == ["SourceFileLoader class"]


def test_a_broken_patch_warns_and_the_import_goes_on(run):
    code = "hooks.install({'toy.engine': 'patches:broken'})\nimport toy.engine\nprint(toy.engine.Engine.name)\n"
    code += "try:\n    hooks.raise_failures()\nexcept RuntimeError as error:\n    print(error)"
    out = run(code)
    assert out[0] == "stock"
    assert "could not attach to toy.engine: KeyError('no such class')" in out[1]
    assert "could not attach to toy.engine" in out[2]  # the warning, on stderr


def test_without_failures_nothing_is_raised(run):
    assert run("hooks.install(TABLE)\nimport toy\nhooks.raise_failures()") == []


def test_a_lohan_section_never_trains_without_us(run):
    """Even if the patch of the config itself is what broke."""
    code = (
        "hooks.install({'deepspeed.runtime.config': 'patches:missing'})\n"
        "from deepspeed.runtime.config import DeepSpeedConfig\n"
        "print(DeepSpeedConfig({})._param_dict)\n"
        "try:\n    DeepSpeedConfig({'lohan': {}})\nexcept RuntimeError as error:\n    print(error)"
    )
    out = run("sys.meta_path[:] = [f for f in sys.meta_path if not isinstance(f, hooks.PatchingFinder)]\n" + code)
    assert out[0] == "{}"
    assert 'has a "lohan" section' in out[1]


def test_the_package_is_light_and_lazy(run):
    code = "import lohan_ds\nprint(sorted({'torch', 'deepspeed', 'numpy', 'pydantic'} & set(sys.modules)))\n"
    code += "print(lohan_ds.ConfigError.__name__, hasattr(lohan_ds, 'nonsense'), 'LohanEngine' in dir(lohan_ds))"
    assert run(code) == ["[]", "ConfigError False True"]


@pytest.mark.parametrize(("value", "active"), [("1", True), ("0", False), ("False", False), ("off", False)])
def test_the_environment_variable_switches_autoload_off(tmp_path, value, active):
    code = "import sys, _lohan_ds_autoload\n_lohan_ds_autoload.activate()\nprint('lohan_ds' in sys.modules)"
    env = {**os.environ, "PYTHONPATH": str(ROOT), "LOHAN_DS_AUTOLOAD": value}
    assert subprocess.check_output([sys.executable, "-c", code], env=env, text=True).strip() == str(active)


def test_activate_never_raises(tmp_path):
    (tmp_path / "lohan_ds").mkdir()
    (tmp_path / "lohan_ds" / "__init__.py").write_text("raise RuntimeError('broken')")
    code = f"import sys\nsys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]\n"
    code += "import _lohan_ds_autoload\n_lohan_ds_autoload.activate()"
    env = {key: text for key, text in os.environ.items() if key not in ("PYTHONPATH", "LOHAN_DS_AUTOLOAD")}
    result = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert result.returncode == 0 and "is not active" in result.stderr
