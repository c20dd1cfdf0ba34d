"""Prints the requirements of pyproject.toml, one per line: those of the package and those of the extras named.

`pip install -e .[extra]` would build the native module as well; set-up installs packages first and builds later, so
that a change of the sources never touches the packages, nor the other way round.
"""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
wanted = list(project["dependencies"])
for extra in sys.argv[1:]:
    wanted += project["optional-dependencies"][extra]
print("\n".join(requirement.replace(" ", "") for requirement in wanted))
