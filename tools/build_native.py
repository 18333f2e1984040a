"""Builds the router's native fast path where there is a C++ compiler; without one PDD works, with more CPU.

Hatchling calls it for wheels and editable installs; ``python tools/build_native.py`` builds in place.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FOLDER = Path("src/pdd/router/fastpath")
LIBRARY = FOLDER / "_fastpath.so"
FLAGS = "-std=c++17 -O2 -Wall -Wextra -fPIC -shared -pthread -static-libstdc++ -static-libgcc"


class NativeBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Puts the library into wheels and editable installs."""

    def initialize(self, _version: str, build_data: dict[str, Any]) -> None:
        """The library is built and belongs to the wheel; it calls no Python, so any Python can load it."""
        if not build(Path(self.root)):
            return
        build_data["artifacts"].append(str(LIBRARY))
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-linux_{os.uname().machine}"


def build(root: Path) -> bool:
    """Whether the library could be built; why not is printed."""
    library, source = root / LIBRARY, root / FOLDER / "fastpath.cpp"
    library.unlink(missing_ok=True)
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None or sys.platform != "linux":
        print("pdd: no C++ compiler: the router works without its native fast path", file=sys.stderr)
        return False
    made = library.with_suffix(".new")
    flags = f"{FLAGS} {os.environ.get('CXXFLAGS', '')}".split()
    result = subprocess.run([*compiler.split(), *flags, str(source), "-o", str(made)], check=False)
    if result.returncode != 0:
        print("pdd: the native fast path does not compile: the router works without it", file=sys.stderr)
        return False
    made.rename(library)
    return True


if __name__ == "__main__":
    sys.exit(0 if build(Path(__file__).parent.parent) else 1)
