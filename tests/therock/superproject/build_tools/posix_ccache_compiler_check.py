"""Prints what identifies a compiler: posix_ccache_compiler_check.py CACHE_DIR COMPILER"""

import hashlib
import pathlib
import shutil
import sys

print(hashlib.sha256(pathlib.Path(shutil.which(sys.argv[2])).read_bytes()).hexdigest())
