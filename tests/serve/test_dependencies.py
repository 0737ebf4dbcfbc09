"""What a server runs on: nothing that was not looked at, and nothing with a known hole.

`requirements.lock` holds the versions that were looked at. A package that is new in the tree, one that is older than
its entry, or an entry that the project itself would not install fails here; where pip-audit and its advisories can be
reached, so does an entry with an advisory. To renew it: install, run `python tests/serve/test_dependencies.py`, look.

What a package asks for counts as long as it is the version that was looked at: the day on which somebody releases a
newer one that wants something else is not the day on which this project breaks.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
LOCK = ROOT / "requirements.lock"
EXTRAS = ("serve", "train")
BUILD = ("nvidia-", "cuda-", "triton", "pytorch-triton")  # come with torch, and differ from build to build


def own_requirements() -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = [*project["dependencies"], *(one for extra in EXTRAS for one in project["optional-dependencies"][extra])]
    return [Requirement(line) for line in lines]


def tree(looked_at: dict[str, Version] | None = None) -> Iterator[tuple[str, Requirement]]:
    """Every requirement of what is installed for a server, with who asks for it; only of packages in these versions."""
    todo, seen = [("diffusiongemma", one) for one in own_requirements()], set[tuple[str, str]]()
    while todo:
        who, wanted = todo.pop()
        yield who, wanted
        name = canonicalize_name(wanted.name)
        for extra in ("", *wanted.extras):
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            if looked_at and name in looked_at and Version(Version(metadata.version(name)).public) != looked_at[name]:
                continue
            for line in metadata.requires(name) or []:
                needed = Requirement(line)
                if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                    todo.append((name, needed))


def names(looked_at: dict[str, Version] | None = None) -> list[str]:
    found = {canonicalize_name(wanted.name) for _, wanted in tree(looked_at)}
    return sorted(name for name in found if not name.startswith(BUILD))


def locked() -> dict[str, Version]:
    lines = [line for line in LOCK.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    return {canonicalize_name(name): Version(version) for name, version in (line.split("==") for line in lines)}


def test_nothing_runs_that_is_not_in_the_lock() -> None:
    if sys.platform != "linux":
        pytest.skip("the lock is of Linux")
    assert [name for name in names(locked()) if name not in locked()] == []


def test_nothing_is_older_than_its_entry() -> None:
    found = {name: Version(metadata.version(name)) for name in names()}
    lock = locked()
    assert {name: (str(v), str(lock[name])) for name, v in found.items() if name in lock and v < lock[name]} == {}


def test_the_entries_are_what_would_be_installed() -> None:
    lock = locked()
    wrong = [
        f"{who} wants {wanted}, the lock has {lock[name]}"
        for who, wanted in tree(lock)
        if (name := canonicalize_name(wanted.name)) in lock
        and not wanted.specifier.contains(lock[name], prereleases=True)
    ]
    assert wrong == []


def test_no_entry_has_an_advisory() -> None:
    tool = shutil.which("pip-audit", path=str(Path(sys.executable).parent)) or shutil.which("pip-audit")
    if tool is None:
        pytest.skip("no pip-audit here")
    command = [tool, "--no-deps", "--disable-pip", "--progress-spinner", "off", "--format", "json", "-r", str(LOCK)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if not result.stdout.startswith("{"):
        pytest.skip(f"the advisories cannot be reached: {result.stderr.strip().splitlines()[-1:]}")
    entries = json.loads(result.stdout)["dependencies"]
    if all("skip_reason" in entry for entry in entries):
        pytest.skip("the advisories cannot be reached")
    assert {entry["name"]: entry["vulns"] for entry in entries if entry.get("vulns")} == {}


if __name__ == "__main__":  # write the lock anew
    head = "# Versions that were looked at, of all that a server runs on: see tests/serve/test_dependencies.py.\n"
    entries = [f"{name}=={Version(metadata.version(name)).public}\n" for name in names()]
    LOCK.write_text(head + "".join(entries), encoding="utf-8")
