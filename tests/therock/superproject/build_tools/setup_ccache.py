#!/usr/bin/env python3
"""Writes ccache's configuration and says where it is."""

import argparse
import pathlib
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", type=pathlib.Path, default=HERE.parent / ".ccache")
    parser.add_argument("--local-path", type=pathlib.Path)
    parser.add_argument("--init", action="store_true")
    parser.add_argument("--reset-stats", default=True, action=argparse.BooleanOptionalAction)
    arguments = parser.parse_args()
    config = arguments.dir / "ccache.conf"
    cache = arguments.local_path or arguments.dir / "local"
    if arguments.init or not config.exists():
        arguments.dir.mkdir(parents=True, exist_ok=True)
        cache.mkdir(parents=True, exist_ok=True)
        check = arguments.dir / "compiler_check.py"
        check.write_bytes((HERE / "posix_ccache_compiler_check.py").read_bytes())
        config.write_text(
            f"max_size = 10G\ncache_dir = {cache}\n"
            f"compiler_check = {sys.executable} {check} {arguments.dir / 'compiler_check_cache'} %compiler%\n"
            "sloppiness = include_file_ctime,pch_defines,time_macros\n"
        )
    if arguments.reset_stats:
        subprocess.run(["ccache", "--zero-stats"], check=True)
    print(f"export CCACHE_CONFIGPATH={config}")


if __name__ == "__main__":
    main()
