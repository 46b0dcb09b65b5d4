"""Runs TheRock's build_prod_wheels.py: build_torch.py 'LIBRARY ...' ARGUMENT...

`import torch` loads all libraries of a list that is part of that program, and fails if one is not there. Those named here
are taken from the list. Where upstream's program does not know one of them any more, this fails before anything is built.
"""

import sys

sys.dont_write_bytecode = True
sys.path.insert(0, "/therock/src/external-builds/pytorch")

import build_prod_wheels as upstream  # noqa: E402

for name in sys.argv[1].split():
    if upstream.LINUX_LIBRARY_PRELOADS.count(name) != 1:
        sys.exit(f"build_prod_wheels.py does not load {name} once: {upstream.LINUX_LIBRARY_PRELOADS}")
    upstream.LINUX_LIBRARY_PRELOADS.remove(name)

upstream.main(sys.argv[2:])
