"""Write the guide docs/start/ten-minutes.md as a Jupyter notebook, ten-minutes.ipynb, in this project's folder.

What the guide's tests run becomes cells of code; all else, with the printed output, stays text. Run it where
`fullshard` is on the PATH, in this project's folder: the guide's paths begin there.

Example:
    python docs/notebook.py                    # or make notebook
    python docs/notebook.py -o /tmp/ten-minutes.ipynb
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
GUIDE = ROOT / "docs" / "start" / "ten-minutes.md"

_BLOCK = re.compile(r"^(<!-- not run: [^>]+ -->\n)?```(\w+)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def notebook(text: str) -> dict[str, Any]:
    """Return the notebook (format 4.5) of a guide's text."""
    cells, end = [], 0
    for block in _BLOCK.finditer(text):
        not_run, language, code = block.groups()
        if not_run or language not in ("bash", "python"):
            continue
        cells += _text_cells(text[end : block.start()])
        source = f"%%bash\n{code}" if language == "bash" else code
        cells.append({"cell_type": "code", "execution_count": None, "outputs": [], "source": source.rstrip("\n")})
        end = block.end()
    cells += _text_cells(text[end:])
    for number, cell in enumerate(cells):
        cell |= {"id": f"cell-{number}", "metadata": {}}
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def _text_cells(text: str) -> list[dict[str, Any]]:
    """Return a cell with the text, its links as seen from the project's folder; none if there is no text."""
    text = re.sub(r"^<!-- .*? -->\n", "", text, flags=re.MULTILINE).strip()
    return [{"cell_type": "markdown", "source": text.replace("](../", "](docs/")}] if text else []


def main() -> None:
    """Write the notebook."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "ten-minutes.ipynb")
    options = parser.parse_args()
    text = json.dumps(notebook(GUIDE.read_text(encoding="utf-8")), indent=1, ensure_ascii=False)
    options.output.write_text(f"{text}\n", encoding="utf-8")
    print(options.output)


if __name__ == "__main__":
    main()
