#!/usr/bin/env python3
"""Imports torch and asks for a GPU."""

import pathlib
import sys

import torch

print(torch.targets())
if not pathlib.Path("/dev/kfd").exists():
    sys.exit("no GPU")
