"""Nothing in the tree depends on, or tells of, the machine it was written on."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Spelt so that this file does not contain what it looks for.
MACHINE_PATH = re.compile(r"(?<![\w.~/-])/(?:" + "|".join(["work", "root", "home"]) + r")/\w")
SECRET = re.compile("|".join(["-----BEGIN [A-Z ]*PRIVATE " + "KEY", "sk-" + "[A-Za-z0-9]{32}"]))
LARGEST = 1 << 20


def tracked_files() -> list[Path]:
    listing = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listing.returncode == 0:
        paths = [ROOT / name for name in listing.stdout.splitlines()]
    else:  # an unpacked archive
        hidden = re.compile(r"\.(?!ci$|gitignore$)|(build|dist)$")
        parts = {path: path.relative_to(ROOT).parts for path in ROOT.rglob("*")}
        paths = [path for path in parts if not any(map(hidden.match, parts[path]))]
    return [path for path in paths if path.is_file() and not path.is_symlink()]


def matches(pattern: re.Pattern[str]) -> list[str]:
    found = []
    for path in tracked_files():
        text = path.read_text(errors="ignore")
        for number, line in enumerate(text.splitlines(), 1):
            if pattern.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}")
    return found


def test_no_paths_of_one_machine() -> None:
    assert matches(MACHINE_PATH) == []


def test_no_keys() -> None:
    assert matches(SECRET) == []


def test_no_large_files() -> None:
    assert [str(p) for p in tracked_files() if p.stat().st_size > LARGEST] == []


def test_the_pattern_finds_what_it_should() -> None:
    bad = "/" + "root/x"
    assert MACHINE_PATH.search(f'path = "{bad}"')
    assert not MACHINE_PATH.search("https://example.org" + "/" + "work/x")
