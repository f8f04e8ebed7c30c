"""The packages of the distribution, by the names that they are installed under."""

from setuptools import find_namespace_packages, setup

PACKAGES = [
    "engine",
    "kvtransfer",
    "worker",
    "prefill_worker",
    "decode_worker",
    "router",
    "cluster",
]

INCLUDED = [*PACKAGES, *(f"{each}.*" for each in PACKAGES)]  # folders of C sources too

setup(packages=[f"kvrelay.{name}" for name in find_namespace_packages(include=INCLUDED)])
