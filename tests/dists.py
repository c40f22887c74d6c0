"""``make dist``: build the sdist, from it the wheel, and check what both hold."""

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parents[1]


def source_files():
    """Return the files of the library that git tracks."""
    command = ["git", "ls-files", "gemproj"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def build(folder):
    """Build both into a folder, which is emptied before, and return the paths of sdist and wheel."""
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "build", "--outdir", folder, ROOT], check=True)
    (sdist,), (wheel,) = Path(folder).glob("*.tar.gz"), Path(folder).glob("*.whl")
    return sdist, wheel


def check_contents(sdist, wheel):
    """Raise unless both hold the library, and nothing but it and what describes it."""
    with zipfile.ZipFile(wheel) as archive:
        in_wheel = {name for name in archive.namelist() if ".dist-info/" not in name}
    with tarfile.open(sdist) as archive:
        files = [PurePosixPath(member.name).parts[1:] for member in archive if member.isfile()]
    in_sdist = {"/".join(parts) for parts in files if parts[:1] != ("gemproj.egg-info",)}
    described = {"CHANGELOG.md", "CITATION.cff", "LICENSE", "MANIFEST.in", "PKG-INFO", "README.md"}
    described |= {"pyproject.toml", "setup.cfg"}
    for kind, held in (("wheel", in_wheel), ("sdist", in_sdist - described)):
        extra, missing = held - source_files(), source_files() - held
        assert not extra, f"files in the {kind} that are not of the library: {sorted(extra)}"
        assert not missing, f"files missing from the {kind}: {sorted(missing)}"


if __name__ == "__main__":
    made = build(ROOT / "dist")
    check_contents(*made)
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *made], check=True)
    print(*(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1000:.0f} kB" for path in made), sep="\n")
