"""Installs Python packages in a virtual environment, and says which: pip.py VENV PIP_ARGUMENT...

What came from an index goes to /run/rockenv/pins/installed, with the SHA-256 of the file, for `rockenv lock`. Where `up --locked` hands
that back, pip takes no other version, and rockenv compares the digests. Wheels that were built here are not in it: no two builds
give the same.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

PINS = Path("/run/rockenv/pins")


def main(venv, *arguments):
    environment = dict(os.environ)
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch, "report.json")
        if (locked := PINS / "locked").exists():
            constraints = Path(scratch, "constraints.txt")
            words = [line.split() for line in locked.read_text().splitlines()]
            constraints.write_text("".join(f"{name}=={version}\n" for name, version, _ in words))
            # Also for what pip takes to build a source package.
            environment["PIP_CONSTRAINT"] = str(constraints)
        pip = [f"{venv}/bin/python", "-m", "pip", "install", "--report", str(report), *arguments]
        code = subprocess.run(pip, env=environment).returncode
        if code:
            sys.exit(code)
        found = json.loads(report.read_text())["install"]
    lines = []
    for package in found:
        origin = package["download_info"]
        if not origin["url"].startswith("file:"):
            metadata, digest = package["metadata"], origin["archive_info"]["hashes"]["sha256"]
            lines.append(f"{metadata['name'].lower()} {metadata['version']} sha256:{digest}\n")
    # A step may install more than once.
    with open(PINS / "installed", "a") as file:
        file.writelines(lines)


main(*sys.argv[1:])
