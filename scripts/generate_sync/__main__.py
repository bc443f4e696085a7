"""Write the files that are out of date; with `--check`, say which are."""

from __future__ import annotations

import sys

from scripts.generate_sync import ROOT, generated


def main() -> int:
    """Write the files; with `--check`, say which are out of date."""
    stale = [(path, text) for path, text in generated() if not path.exists() or path.read_text() != text]
    for path, text in stale:
        print(f"{'out of date' if '--check' in sys.argv else 'written'}: {path.relative_to(ROOT)}")
        if "--check" not in sys.argv:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
    if stale and "--check" in sys.argv:
        print("run `make format`")
    return int(bool(stale) and "--check" in sys.argv)


if __name__ == "__main__":
    sys.exit(main())
