"""Print a constraints file that pins every dependency to its lower bound.

python infra/scripts/lowest.py > lowest.txt && pip install -c lowest.txt -e '.[test]'
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

PYPROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"


def pins(requirements: list[str]) -> list[str]:
    """Turn `name[extra]>=x,<y` into `name==x`."""
    found = (re.match(r"([\w.-]+)(?:\[[^]]*\])?>=([\w.]+)", line) for line in requirements)
    return [f"{match[1]}=={match[2]}" for match in found if match]


def main() -> None:
    """Print the pins of the runtime and test dependencies."""
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    print("\n".join(pins(project["dependencies"] + project["optional-dependencies"]["test"])))


if __name__ == "__main__":
    main()
