"""What pyproject.toml cannot say: the folder `ops/` is installed as the package `lohan_ds.ops`, and operators may be
built at install, as DeepSpeed's are:

    DS_BUILD_LOHAN_CPU_ADAM=1 DS_BUILD_LOHAN_GRAD_ACCUMULATE=1 DS_BUILD_LOHAN_GRAD_PACK=1 \\
        pip install --no-build-isolation .
"""

import importlib.util
import os

from setuptools import find_packages, setup


def native_operators():
    """Operators whose DS_BUILD_LOHAN_<NAME> is 1; the others are built at first use."""
    wanted = {name for name, value in os.environ.items() if name.startswith("DS_BUILD_LOHAN_") and value == "1"}
    if not wanted:
        return {}
    from torch.utils.cpp_extension import BuildExtension
    spec = importlib.util.spec_from_file_location("lohan_builders", "ops/builders.py")
    builders = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(builders)
    found = [builder() for builder in builders.BUILDERS.values() if builder.BUILD_VAR in wanted]
    return {"ext_modules": [builder.builder() for builder in found], "cmdclass": {"build_ext": BuildExtension}}


setup(
    packages=[*find_packages(include=["lohan_ds", "lohan_ds.*"]), "lohan_ds.ops"],
    package_dir={"lohan_ds.ops": "ops"},
    py_modules=["_lohan_ds_autoload"],
    **native_operators(),
)
