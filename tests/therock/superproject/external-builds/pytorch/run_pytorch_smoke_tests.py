#!/usr/bin/env python3
"""Runs the smoke tests by pytest, for each GPU that PyTorch sees."""

import os
import pathlib
import subprocess
import sys

TESTS = pathlib.Path(__file__).resolve().parent / "smoke-tests"

# As upstream, in another process: this one must not hold a GPU.
QUERY = "import torch; print(torch.cuda.device_count())"


def main():
    found = subprocess.run([sys.executable, "-c", QUERY], check=True, stdout=subprocess.PIPE, text=True)
    count = int(found.stdout)
    if not count:
        sys.exit("ROCm is not available")
    code = 0
    for device in range(count):
        environment = {**os.environ, "HIP_VISIBLE_DEVICES": str(device)}
        done = subprocess.run([sys.executable, "-m", "pytest", str(TESTS), *sys.argv[1:]], env=environment)
        code = done.returncode or code
    return code


if __name__ == "__main__":
    sys.exit(main())
