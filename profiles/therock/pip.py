"""Installs Python packages in a virtual environment, or runs a build that does, and says which:

    pip.py VENV PIP_ARGUMENT...
    pip.py --around PROGRAM ARGUMENT...

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


def main(first, *rest):
    environment = dict(os.environ)
    with tempfile.TemporaryDirectory() as scratch:
        if (locked := PINS / "locked").exists():
            constraints = Path(scratch, "constraints.txt")
            words = [line.split() for line in locked.read_text().splitlines()]
            constraints.write_text("".join(f"{name}=={version}\n" for name, version, _ in words))
            # The second is for what a newer pip takes to build a source package.
            environment["PIP_CONSTRAINT"] = environment["PIP_BUILD_CONSTRAINT"] = str(constraints)
        reports = Path(scratch, "reports")
        reports.mkdir()
        if first == "--around":
            command = rest
            paths = [str(Path(__file__).parent / "reports"), os.environ.get("PYTHONPATH")]
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
            environment["ROCKENV_PIP_REPORTS"] = str(reports)
        else:
            command = [f"{first}/bin/python", "-m", "pip", "install", "--report", str(reports / "0.json"), *rest]
        code = subprocess.run(command, env=environment).returncode
        if code:
            sys.exit(code)
        found = [package for report in sorted(reports.iterdir()) for package in json.loads(report.read_text())["install"]]
    lines = []
    for package in found:
        origin = package["download_info"]
        # A commit of a repository is named by who asks for it.
        if "archive_info" in origin and not origin["url"].startswith("file:"):
            metadata, digest = package["metadata"], origin["archive_info"]["hashes"]["sha256"]
            lines.append(f"{metadata['name'].lower()} {metadata['version']} sha256:{digest}\n")
    # A step may install more than once.
    with open(PINS / "installed", "a") as file:
        file.writelines(lines)


main(*sys.argv[1:])
