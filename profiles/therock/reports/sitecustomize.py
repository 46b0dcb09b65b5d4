"""Has every `python -m pip install` of a build write down what it takes: `pip.py --around` puts this directory into PYTHONPATH.

Without what a pip of pip's own installs for a while to build a source package: whether it does depends on what its cache has.
"""

import os
import sys
import time

if "-m" in sys.orig_argv and (into := os.environ.get("ROCKENV_PIP_REPORTS")):
    module = sys.orig_argv.index("-m") + 1
    if sys.orig_argv[module : module + 2] == ["pip", "install"] and "--report" not in sys.argv:
        # The order of their names is that in which they ran.
        sys.argv += ["--report", os.path.join(into, f"{time.time_ns()}-{os.getpid()}.json")]
