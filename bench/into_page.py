#!/usr/bin/env python3
"""Put a text into a page, between the lines `<!-- NAME -->` and `<!-- end NAME -->`, in place of what is there.

usage: into_page.py PAGE.md NAME FILE
"""
import re
import sys


def into_page(page, name, text):
    with open(page, encoding="utf-8") as f:
        before = f.read()
    pattern = re.compile(rf"(<!-- {re.escape(name)} -->\n).*?(<!-- end {re.escape(name)} -->)", re.S)
    after, n = pattern.subn(lambda m: m[1] + "\n" + text.strip() + "\n\n" + m[2], before)
    if n != 1:
        sys.exit(f"{page} has no place for {name}")
    with open(page, "w", encoding="utf-8") as f:
        f.write(after)


def main():
    if len(sys.argv) != 4:
        sys.exit(__doc__.split("\n\n")[1])
    with open(sys.argv[3], encoding="utf-8") as f:
        # Lines that say which plots were made are no part of the page.
        lines = [line for line in f.read().splitlines() if not line.endswith(".svg")]
    into_page(sys.argv[1], sys.argv[2], "\n".join(lines))


if __name__ == "__main__":
    main()
