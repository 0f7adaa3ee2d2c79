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


def tables(doc, lines_of):
    """The main function of a script that prints tables: `[--page PAGE.md NAME] ROWS...`; lines_of(paths, page) makes
    them, where page is None or the page they are for."""
    args, page = sys.argv[1:], None
    if args[:1] == ["--page"]:
        page, args = args[1:3], args[3:]
    if not args or (page is not None and len(page) < 2):
        sys.exit(doc.split("\n\n")[1])
    text = "\n".join(lines_of(args, page and page[0]))
    if page:
        into_page(*page, text)
    else:
        print(text)


def main():
    if len(sys.argv) != 4:
        sys.exit(__doc__.split("\n\n")[1])
    with open(sys.argv[3], encoding="utf-8") as f:
        # Lines that say which plots were made are no part of the page.
        lines = [line for line in f.read().splitlines() if not line.endswith(".svg")]
    into_page(sys.argv[1], sys.argv[2], "\n".join(lines))


if __name__ == "__main__":
    main()
