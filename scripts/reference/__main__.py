"""Write the files that are out of date, and remove pages of names that are gone; with `--check`, say which are."""

from __future__ import annotations

import sys

from scripts.reference import PAGES, ROOT, generated


def main() -> int:
    """Write the files; with `--check`, say which are out of date."""
    check = "--check" in sys.argv
    wanted = dict(generated())
    stale = [path for path, text in wanted.items() if not path.exists() or path.read_text("utf-8") != text]
    gone = [path for path in PAGES.glob("*.md") if path not in wanted]
    for path in [*stale, *gone]:
        print(f"{'out of date' if check else 'written' if path in wanted else 'removed'}: {path.relative_to(ROOT)}")
    if check:
        if stale or gone:
            print("run `make reference`")
        return int(bool(stale or gone))
    PAGES.mkdir(exist_ok=True)
    for path in stale:
        path.write_text(wanted[path], "utf-8")
    for path in gone:
        path.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
