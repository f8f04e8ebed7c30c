"""The packages of the distribution, by the names that they are installed under."""

from setuptools import find_packages, setup

PACKAGES = [
    "engine",
    "kvtransfer",
    "worker",
    "prefill_worker",
    "decode_worker",
    "router",
    "cluster",
]

setup(
    packages=[
        f"kvrelay.{name}"
        for name in find_packages(include=[*PACKAGES, *(f"{each}.*" for each in PACKAGES)])
    ]
)
