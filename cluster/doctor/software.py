"""Versions that do not fit: of packages, and of CUDA between torch, NIXL and the driver."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from kvrelay.cluster.doctor.findings import Finding, fail, ok, skipped, warn
from kvrelay.cluster.events.section import EventsSection


def installed() -> dict[str, str]:
    """Versions of all that is installed, by canonical name."""
    return {
        canonicalize_name(each.metadata["Name"]): each.version for each in metadata.distributions()
    }


def requirements() -> list[str]:
    return metadata.requires("kvrelay") or []


def check_packages(required: Iterable[str], versions: Mapping[str, str]) -> Finding:
    """What an extra asks for may be missing, but not be of another version."""
    check = "packages"
    wrong = []
    num = 0
    for requirement in map(Requirement, required):
        name = canonicalize_name(requirement.name)
        version = versions.get(name)
        is_extra = requirement.marker is not None and not requirement.marker.evaluate({"extra": ""})
        if version is None and not is_extra:
            wrong.append(f"{name} is missing")
        elif version is not None and not requirement.specifier.contains(version, prereleases=True):
            wrong.append(f"{name} {version} is not {requirement.specifier}")
        num += version is not None
    if wrong:
        return fail(
            check, "; ".join(wrong), "pip install -c constraints.txt kvrelay, or make setup"
        )
    return ok(check, f"{num} of the wanted versions")


def check_events(events: EventsSection, versions: Mapping[str, str]) -> Finding:
    """They have the tokens of prompts, and no keys."""
    check = "KV events"
    if not events.endpoint:
        return skipped(check, "events.endpoint is empty")
    if "pyzmq" not in versions:
        return fail(check, "pyzmq is missing", "pip install 'kvrelay[events]'")
    given = [each for each in (events.endpoint, events.replay_endpoint) if each]
    is_local = all(each.startswith(("ipc://", "tcp://127.", "tcp://localhost:")) for each in given)
    if not is_local:
        text = f"whoever reaches {' or '.join(given)} reads prompts"
        return warn(check, text, "keep it within a network of its own: docs/events.md")
    if not events.replay_endpoint:
        text = "events.replay_endpoint is empty: what a subscriber misses, it never learns"
        return warn(check, text, "set it: docs/events.md")
    return ok(check, ", ".join(given))


def check_cuda(versions: Mapping[str, str], root: Path) -> Finding:
    """torch says its CUDA in its version (+cu130), NIXL in its name (nixl-cu13)."""
    check = "CUDA"
    has_driver = (root / "proc/driver/nvidia/version").exists()
    _, _, build = versions.get("torch", "").partition("+")
    nixl = [name for name in versions if name.startswith("nixl-cu")]
    if not has_driver:
        return skipped(check, "no NVIDIA driver")
    if build == "cpu":
        return fail(
            check,
            f"an NVIDIA driver, and torch {versions['torch']}, which is for CPUs",
            "pip install torch for CUDA: see deploy/README.md",
        )
    major = build.removeprefix("cu")[:2]
    if major.isdigit() and nixl and f"nixl-cu{major}" not in nixl:
        return fail(
            check,
            f"torch is for CUDA {major}, NIXL is {', '.join(nixl)}",
            f"pip uninstall {' '.join(nixl)}; pip install nixl-cu{major}",
        )
    if not nixl:
        return warn(check, "no nixl-cu package", f"pip install nixl-cu{major or '13'}")
    return ok(check, f"torch +{build or 'default'}, {', '.join(nixl)}")
