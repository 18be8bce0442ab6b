"""What pyproject.toml cannot say: the folder `ops/` is installed as the package `lohan_ds.ops`."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["lohan_ds", "lohan_ds.*"]), "lohan_ds.ops"],
    package_dir={"lohan_ds.ops": "ops"},
    py_modules=["_lohan_ds_autoload"],
)
