"""What a release was made from: a bill of materials, and a statement of how it was made."""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import metadata
from typing import Any

from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.license import DisjunctiveLicense
from cyclonedx.output import make_outputter
from cyclonedx.schema import OutputFormat, SchemaVersion
from packageurl import PackageURL
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

BUILD = "deploy/release"


def pinned(constraints: str) -> dict[str, str]:
    """Versions by name."""
    found = re.findall(r"^([\w.-]+)==([\w.+!-]+)", constraints, re.MULTILINE)
    return {canonicalize_name(name): version for name, version in found}


def requirements_of(name: str, extras: set[str]) -> list[Requirement]:
    """Of an installed distribution; none of another."""
    try:
        found = metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        return []
    return [each for each in map(Requirement, found) if is_wanted(each, extras)]


def is_wanted(requirement: Requirement, extras: set[str]) -> bool:
    given = [{"extra": each} for each in ("", *sorted(extras))]
    return requirement.marker is None or any(map(requirement.marker.evaluate, given))


def dependencies(project: Mapping[str, Any], versions: Mapping[str, str]) -> dict[str, str]:
    """All that `pip install 'kvrelay[all]' -c constraints` brings, by name: versions, "" where
    none is pinned."""
    optional = project["optional-dependencies"]
    wanted = [*map(Requirement, project["dependencies"])]
    (everything,) = map(Requirement, optional["all"])
    wanted += [Requirement(each) for extra in everything.extras for each in optional[extra]]
    found: dict[str, str] = {}
    while wanted:
        requirement = wanted.pop()
        name = canonicalize_name(requirement.name)
        if not is_wanted(requirement, set()) or name == project["name"]:
            continue
        if name not in found or requirement.extras:
            wanted += requirements_of(name, requirement.extras)
        found[name] = versions.get(name, "")
    return found


def licence_of(name: str) -> str:
    """As a distribution states it; "": it is not installed, or does not."""
    try:
        stated = metadata.metadata(name)
    except metadata.PackageNotFoundError:
        return ""
    text = stated.get("License-Expression") or stated.get("License") or ""
    return text if "\n" not in text and len(text) < 80 else ""


def bill_of_materials(project: Mapping[str, Any], constraints: str) -> str:
    """As CycloneDX 1.6, in JSON."""
    own = Component(
        name=project["name"],
        version=project["version"],
        type=ComponentType.APPLICATION,
        licenses=[DisjunctiveLicense(id=project["license"])],
        purl=PackageURL("pypi", name=project["name"], version=project["version"]),
        bom_ref=project["name"],
    )
    bom = Bom()
    bom.metadata.component = own
    parts = []
    for name, version in sorted(dependencies(project, pinned(constraints)).items()):
        licence = licence_of(name)
        part = Component(
            name=name,
            version=version or None,
            type=ComponentType.LIBRARY,
            licenses=[DisjunctiveLicense(name=licence)] if licence else [],
            purl=PackageURL("pypi", name=name, version=version or None),
            bom_ref=name,
        )
        bom.components.add(part)
        parts.append(part)
    bom.register_dependency(own, parts)
    outputter = make_outputter(bom, OutputFormat.JSON, SchemaVersion.V1_6)
    return outputter.output_as_string(indent=2) + "\n"


def provenance(digests: Mapping[str, str], commit: str, constraints: str) -> str:
    """An in-toto statement with SLSA's predicate. Nobody has signed it."""
    tools = ("auditwheel", "cyclonedx-python-lib", "pip", "setuptools", "wheel")
    versions = {each: metadata.version(each) for each in tools}
    statement = {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": n, "digest": {"sha256": d}} for n, d in sorted(digests.items())],
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": BUILD,
                "externalParameters": {"commit": commit},
                "internalParameters": {"machine": platform.machine(), "tools": versions},
                "resolvedDependencies": [{"uri": "git", "digest": {"gitCommit": commit}}]
                + [
                    {"uri": str(PackageURL("pypi", name=name, version=version))}
                    for name, version in sorted(pinned(constraints).items())
                ],
            },
            "runDetails": {
                "builder": {"id": "make release", "version": {"python": platform.python_version()}},
                "metadata": {"finishedOn": datetime.now(UTC).isoformat(timespec="seconds")},
            },
        },
    }
    return json.dumps(statement, indent=2) + "\n"
