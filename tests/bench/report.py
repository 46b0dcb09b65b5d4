"""Owns the tables and pictures made from the measured rows."""

import statistics
from html import escape

from measure import spread

WIDTH, LABEL, BAR, HEIGHT = 900, 470, 340, 24


def replaced(text, name, content):
    """Returns the page with `content` between its marks `<!-- bench: NAME -->` and `<!-- end -->`."""
    start = f"<!-- bench: {name} -->\n"
    before, found, rest = text.partition(start)
    _, end, after = rest.partition("<!-- end -->")
    if not found or not end:
        raise SystemExit(f"the page has no place for the section {name}: {start.strip()} and <!-- end -->")
    return f"{before}{start}{content}\n{end}{after}"


def table(measured):
    lines = ["| what | median | least | 9 of 10 | most | runs | limit | |", "| --- | ---: | ---: | ---: | ---: | ---: | --- | --- |"]
    for row in measured:
        *values, count = spread(row["times"])
        numbers = " | ".join(f"{value:.1f}" for value in values)
        mark = {None: "", True: "met", False: "**missed**"}[row["met"]]
        lines.append(f"| {row['what']} | {numbers} | {count} | {row['limit']} | {mark} |")
    return "\n".join(lines)


def picture(section, measured):
    """Draws a bar for each row, as long as its median, with a line from the minimum to the maximum. Leaves out other units."""
    measured = [row for row in measured if "MiB" not in row["what"]]
    if len(measured) < 2:
        return None
    longest = max(max(row["times"]) for row in measured) or 1
    height = HEIGHT * len(measured) + 8
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img" aria-labelledby="t">',
        f'<title id="t">Milliseconds, section {section}: median, and from the least to the most</title>',
        "<style>text{font-family:sans-serif;font-size:12px;fill:#16283d}.l{text-anchor:end}"
        ".o{fill:#2d6cb5}.p{fill:#a9b4c0}.s{stroke:#16283d}</style>",
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
    ]
    x = lambda value: LABEL + value / longest * BAR
    for number, row in enumerate(measured):
        top = 4 + number * HEIGHT
        middle = top + HEIGHT / 2
        median, times = statistics.median(row["times"]), row["times"]
        label = row["what"].split(";")[0].replace("`", "")
        label = label if len(label) <= 76 else label[:75] + "…"
        own = "o" if ours(row["what"]) else "p"
        parts += [
            f'<text class="l" x="{LABEL - 8}" y="{middle + 4:.0f}">{escape(label)}</text>',
            f'<rect class="{own}" x="{LABEL}" y="{top + 4}" width="{max(x(median) - LABEL, 1):.1f}" height="{HEIGHT - 8}"/>',
            f'<path class="s" d="M{x(min(times)):.1f} {middle:.0f}H{x(max(times)):.1f}"/>',
            f'<text x="{x(max(times)) + 6:.1f}" y="{middle + 4:.0f}">{median:,.1f}</text>',
        ]
    return "\n".join([*parts, "</svg>", ""])


# Prefixes of other programs' rows; all other rows are rockenv's.
PEERS = ("`systemd-nspawn", "`true", "`hipcc", "`git ", "`docker", "`podman", "`skopeo", "GNU ", "`diskus", "`dua", "`pdu", "`btrfs", "`rm -rf", "ninjas in a ninja, `-j")


def ours(what):
    return not what.startswith(PEERS)
