#!/usr/bin/env -S python3 -B
"""Draws docs/explanation/pictures/time-left.svg: the time left that `up` shows against the actual time, from recorded builds.

    tests/bench/time_left.py

The points are those that the tests of src/plan/time_left.rs print. Grey is the range, blue the estimate, the dashed line the truth.
"""

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SIZE, GAP, LEFT, TOP, LEGEND = 200, 64, 56, 40, 40


def main():
    tests = ["cargo", "test", "--locked", "--lib", "--", "--nocapture", "--test-threads", "1", "plan::time_left"]
    done = subprocess.run(tests, cwd=ROOT, check=True, capture_output=True, text=True)
    charts = {}
    for line in done.stdout.splitlines():
        fields = line.split("test ")[-1].split(" ... ")[-1].split(",")
        if len(fields) == 7:
            name, case, percent, *values = fields
            charts.setdefault((name, case.strip()), []).append((int(percent), *map(float, values)))
    if len(charts) != 6:
        raise SystemExit(f"6 charts expected, not {len(charts)}")
    names = list(dict.fromkeys(name for name, _ in charts))
    cases = [("new", "first build"), ("known", "commands known")]
    width = LEFT + len(names) * (SIZE + GAP)
    height = TOP + len(cases) * (SIZE + GAP) + LEGEND
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" aria-labelledby="t d">',
             '<title id="t">Time left, estimated and true</title>',
             '<desc id="d">One chart for each recorded build, above as a first build, below with its commands known; horizontal: time since the build began, vertical: time left, both in parts of the whole.</desc>',
             '<style>text{font-family:sans-serif;font-size:12px;text-anchor:middle;fill:#16283d}.r{fill:#d5d9de}.e{fill:none;stroke:#2d6cb5;stroke-width:2}'
             '.t{stroke:#444;stroke-dasharray:5 4}.f{fill:none;stroke:#8593a3}.v{text-anchor:end}.l{text-anchor:start}</style>',
             f'<rect width="{width}" height="{height}" fill="#fff"/>']
    for row, (case, title) in enumerate(cases):
        for column, name in enumerate(names):
            x0, y0 = LEFT + column * (SIZE + GAP), TOP + row * (SIZE + GAP)
            x = lambda percent: f"{x0 + percent / 100 * SIZE:.1f}"
            y = lambda left: f"{y0 + SIZE - min(left, 1.2) / 1.2 * SIZE:.1f}"
            points = charts[name, case]
            above = [f"{x(p)},{y(most)}" for p, _, _, _, most in points]
            below = [f"{x(p)},{y(least)}" for p, _, least, _, _ in reversed(points)]
            parts += [f'<polygon class="r" points="{" ".join(above + below)}"/>',
                      f'<line class="t" x1="{x(0)}" y1="{y(1)}" x2="{x(100)}" y2="{y(0)}"/>',
                      f'<polyline class="e" points="{" ".join(f"{x(p)},{y(likely)}" for p, _, _, likely, _ in points)}"/>',
                      f'<rect class="f" x="{x0}" y="{y0}" width="{SIZE}" height="{SIZE}"/>',
                      f'<text x="{x0 + SIZE / 2}" y="{y0 - 8}">{name}, {title}</text>',
                      f'<text x="{x0}" y="{y0 + SIZE + 16}">0</text><text x="{x0 + SIZE - 8}" y="{y0 + SIZE + 16}">100 %</text>',
                      f'<text x="{x0 + SIZE / 2}" y="{y0 + SIZE + 16}">time gone</text>',
                      f'<text x="{x0 - 6}" y="{y0 + SIZE + 4}" class="v">0</text><text x="{x0 - 6}" y="{y(1)}" class="v">100 %</text>']
    x0, y0 = LEFT, height - LEGEND / 2
    parts += [f'<rect class="r" x="{x0}" y="{y0 - 8}" width="30" height="12"/><text class="l" x="{x0 + 38}" y="{y0 + 3}">range of the time left</text>',
              f'<line class="e" x1="{x0 + 190}" y1="{y0}" x2="{x0 + 220}" y2="{y0}"/><text class="l" x="{x0 + 228}" y="{y0 + 3}">estimate</text>',
              f'<line class="t" x1="{x0 + 310}" y1="{y0}" x2="{x0 + 340}" y2="{y0}"/><text class="l" x="{x0 + 348}" y="{y0 + 3}">truth</text>',
              f'<text class="l" x="{x0 + 420}" y="{y0 + 3}">100 % is the time of the whole build</text>']
    (ROOT / "docs/explanation/pictures/time-left.svg").write_text("\n".join(parts + ["</svg>"]) + "\n")


if __name__ == "__main__":
    main()
