"""Draws the terminal after real commands as SVG, and a report page as PNG: `make pictures`.

usage: record.py ROCKENV

Needs root and chromium. The commands see an empty store at /var/lib/rockenv, in a mount namespace of their own.
"""

import codecs
import ctypes
import fcntl
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
from itertools import groupby
from pathlib import Path

import pyte
from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.style import Style
from rich.text import Text

COLUMNS = 116
HERE = Path(__file__).parent
STORE = Path("/var/lib/rockenv")

# In this order, in one store: what a picture shows was built by those before it.
PICTURES = {
    "plan": ["rockenv plan gfx1103"],
    "up": ["rockenv up hip-smoke --target gfx1103", "rockenv plan hip-smoke --target gfx90a"],
    "du": ["rockenv du"],
}

CLONE_NEWNS = 0x00020000
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000


def libc(name, *arguments):
    library = ctypes.CDLL(None, use_errno=True)
    if getattr(library, name)(*arguments) != 0:
        raise OSError(ctypes.get_errno(), name)


def own_store(scratch):
    """Mounts an empty directory at the store's place, for this process and its children only."""
    libc("unshare", CLONE_NEWNS)
    libc("mount", None, b"/", None, MS_REC | MS_PRIVATE, None)
    # The place is made in a layer over its parent: nobody else sees it, even if this process is killed.
    for name in ("upper", "work", "store"):
        os.mkdir(f"{scratch}/{name}")
    options = f"lowerdir={STORE.parent},upperdir={scratch}/upper,workdir={scratch}/work"
    libc("mount", b"overlay", bytes(STORE.parent), b"overlay", 0, options.encode())
    STORE.mkdir(exist_ok=True)
    libc("mount", f"{scratch}/store".encode(), bytes(STORE), None, MS_BIND, None)


def run(words, stream):
    """Runs a command in a terminal, whose output goes to `stream` as it comes."""
    child, terminal = pty.fork()
    if child == 0:
        os.environ |= {"TERM": "xterm-256color", "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
        for name in ("ROCKENV_HOME", "NO_COLOR", "CI"):
            os.environ.pop(name, None)
        os.chdir("/")
        os.execv(words[0], words)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 60, COLUMNS, 0, 0))
    decode = codecs.getincrementaldecoder("utf-8")("replace").decode
    while True:
        try:
            data = os.read(terminal, 65536)
        except OSError:
            break
        # pyte shows what follows an operating system command (the title, progress) as text.
        stream.feed(re.sub(r"\x1b\][^\x07\x1b]*(\x07|\x1b\\)", "", decode(data)))
    os.close(terminal)
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0:
        sys.exit(f"{' '.join(words)} failed:\n" + "\n".join(stream.listener.display))


def color(name):
    if name == "default":
        return None
    if re.fullmatch("[0-9a-f]{6}", name):
        return f"#{name}"
    return name.replace("bright", "bright_").replace("brown", "yellow")


def lines(screen):
    shown = []
    for number in range(screen.lines):
        cells = [screen.buffer[number][column] for column in range(COLUMNS)]
        line = Text()
        for (fg, bg, bold), part in groupby(cells, lambda cell: (cell.fg, cell.bg, cell.bold)):
            line.append("".join(cell.data for cell in part), Style(color=color(fg), bgcolor=color(bg), bold=bold))
        line.rstrip()
        shown.append(line)
    while shown and not shown[-1].plain:
        shown.pop()
    return shown


def draw(name, commands, rockenv):
    screen = pyte.Screen(COLUMNS, 200)
    stream = pyte.Stream(screen)
    stream.listener = screen
    for command in commands:
        stream.feed(f"\x1b[1m$ sudo {command}\x1b[0m\r\n")
        run([rockenv, *command.split()[1:]], stream)
        if screen.cursor.x != 0:
            stream.feed("\r\n")
    with open(os.devnull, "w") as nowhere:
        console = Console(record=True, width=COLUMNS, file=nowhere, force_terminal=True, color_system="truecolor")
        for line in lines(screen):
            console.print(line, no_wrap=True, highlight=False)
    # No font from elsewhere: the reader's own.
    form = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL).replace("Fira Code, ", "")
    text = console.export_svg(title="rockenv", code_format=form, unique_id=name)
    (HERE / f"{name}.svg").write_text(re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE))
    print(f"{HERE / name}.svg")


def photograph(rockenv, env, scratch):
    page = f"{scratch}/report.html"
    subprocess.run([rockenv, "report", env, "--output", page], check=True, cwd="/")
    chromium = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1000,1100"]
    quiet = ["--disable-background-networking", "--no-first-run", f"--user-data-dir={scratch}/chromium"]
    picture = HERE / "report.png"
    subprocess.run([*chromium, *quiet, f"--screenshot={picture}", f"file://{page}"], check=True, stderr=subprocess.DEVNULL)
    print(picture)


def main():
    rockenv = os.path.realpath(sys.argv[1])
    scratch = tempfile.mkdtemp(dir="/var/tmp")
    own_store(scratch)
    try:
        for name, commands in PICTURES.items():
            draw(name, commands, rockenv)
        photograph(rockenv, "hip-smoke-gfx1103", scratch)
    finally:
        libc("umount2", bytes(STORE), 0)
        libc("umount2", bytes(STORE.parent), 0)
        shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    main()
