#!/usr/bin/env python3
"""Fail unless the device code in FILE is for exactly one ISA.

    check_isa.py [--extract DIR] [--tools DIR] FILE TARGET

What is read is the code, not the build's own account of it: every offload bundle in the .hip_fatbin section (a library
has one for each translation unit; `clang-offload-bundler --list` shows only the first), and in every bundle the entry's
name, the ELF header's EF_AMDGPU_MACH and the `amdhsa.target` note of the code object itself. All three must say TARGET,
and each bundle must hold one code object. Carving is done here; unbundling (and decompressing), and reading ELF are
done by the LLVM tools that belong to the compiler.
"""

import argparse
import collections
import pathlib
import re
import struct
import subprocess
import sys
import tempfile

PLAIN = b"__CLANG_OFFLOAD_BUNDLE__"
COMPRESSED = b"CCOB"
DEVICE_ENTRY = re.compile(r"(?:hip|hipv4)-amdgcn-amd-amdhsa-[a-z]*-(?P<target>gfx.+)")


def run(*command):
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{command[0]}: exit code {done.returncode}\n{done.stderr}")
    return done.stdout


def plain_length(data, start):
    """Length of an uncompressed bundle: the end of its last entry."""
    (count,) = struct.unpack_from("<Q", data, start + len(PLAIN))
    position = start + len(PLAIN) + 8
    end = position - start
    for _ in range(count):
        offset, size, name_length = struct.unpack_from("<QQQ", data, position)
        position += 24 + name_length
        end = max(end, position - start, offset + size)
    return end


def compressed_length(data, start):
    version, _method = struct.unpack_from("<HH", data, start + 4)
    if version == 2:
        return struct.unpack_from("<I", data, start + 8)[0]
    if version == 3:
        return struct.unpack_from("<Q", data, start + 8)[0]
    sys.exit(f"compressed offload bundle of version {version}, which does not say how long it is")


def carve(data):
    """All bundles of a .hip_fatbin section, which are padded to page boundaries with zeros."""
    position = 0
    while position < len(data):
        if data.startswith(PLAIN, position):
            length = plain_length(data, position)
        elif data.startswith(COMPRESSED, position):
            length = compressed_length(data, position)
        elif data[position] == 0:
            position += 1
            continue
        else:
            sys.exit(f".hip_fatbin holds something that is not an offload bundle at offset {position:#x}")
        if length <= 0 or position + length > len(data):
            sys.exit(f"the offload bundle at offset {position:#x} is cut off")
        yield data[position : position + length]
        position += length


def mach_of(header):
    found = re.search(r"EF_AMDGPU_MACH_AMDGCN_(GFX\w+)", header)
    if not found:
        sys.exit(f"no EF_AMDGPU_MACH in the ELF header:\n{header}")
    return found[1].lower().replace("_", "-")


def main():
    parser = argparse.ArgumentParser(description="fail unless the device code in FILE is for exactly one ISA")
    parser.add_argument("file", type=pathlib.Path)
    parser.add_argument("target")
    parser.add_argument("--extract", type=pathlib.Path, metavar="DIR", help="keep the code objects there")
    parser.add_argument("--tools", type=pathlib.Path, metavar="DIR", help="where llvm-readobj is; default: ask hipcc")
    arguments = parser.parse_args()

    tools = arguments.tools or pathlib.Path(run("hipcc", "-print-prog-name=llvm-readobj").strip()).parent
    bundler, objcopy, readobj = (tools / name for name in ("clang-offload-bundler", "llvm-objcopy", "llvm-readobj"))

    problems = []
    seen = collections.Counter()
    with tempfile.TemporaryDirectory() as scratch:
        scratch = pathlib.Path(scratch)
        section = scratch / "hip_fatbin"
        # Without the second operand objcopy would write FILE anew.
        run(objcopy, f"--dump-section=.hip_fatbin={section}", arguments.file, "/dev/null")
        keep = arguments.extract or scratch
        keep.mkdir(parents=True, exist_ok=True)

        for number, data in enumerate(carve(section.read_bytes())):
            bundle = scratch / "bundle"
            bundle.write_bytes(data)
            names = run(bundler, "--list", "--type=o", f"--input={bundle}").split()
            devices = [name for name in names if not name.startswith("host-")]
            if len(devices) != 1:
                problems.append(f"bundle {number} holds {len(devices)} code objects: {' '.join(devices) or 'none'}")
            for device in devices:
                entry = DEVICE_ENTRY.fullmatch(device)
                if not entry:
                    problems.append(f"bundle {number} holds {device}, which is not AMD GPU code")
                    continue
                code = keep / f"{arguments.file.name}.{number}.{entry['target'].replace(':', '_')}.co"
                run(bundler, "--unbundle", "--type=o", f"--targets={device}", f"--input={bundle}", f"--output={code}")
                mach = mach_of(run(readobj, "--file-header", code))
                note = re.search(r"amdhsa\.target:\s*'?amdgcn-amd-amdhsa-[a-z]*-([\w:+-]+)", run(readobj, "--notes", code))
                if not note:
                    problems.append(f"bundle {number}: no amdhsa.target note")
                    continue
                found = (entry["target"], mach, note[1])
                seen[found] += 1
                if found != (arguments.target,) * 3:
                    problems.append(f"bundle {number}: entry %s, ELF machine %s, note %s" % found)

    for (entry, mach, note), count in sorted(seen.items()):
        print(f"{arguments.file}: {count} code object(s): entry {entry}, ELF machine {mach}, note {note}")
    if not seen:
        problems.append("no AMD GPU code at all")
    if problems:
        sys.exit(f"{arguments.file}: not exactly {arguments.target}:\n  " + "\n  ".join(problems))


if __name__ == "__main__":
    main()
