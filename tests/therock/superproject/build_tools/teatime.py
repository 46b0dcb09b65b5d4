#!/usr/bin/env python3
"""Runs a command with its output in a file too: teatime.py [--label NAME] LOG -- COMMAND..."""

import pathlib
import subprocess
import sys

words = sys.argv[1:]
split = words.index("--")
log = pathlib.Path(words[split - 1])
log.parent.mkdir(parents=True, exist_ok=True)
# As upstream: a child that inherits no descriptors but the standard ones.
with subprocess.Popen(words[split + 1 :], stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as child, log.open("wb") as file:
    for line in child.stdout:
        file.write(line)
        sys.stdout.buffer.write(line)
sys.exit(child.returncode)
