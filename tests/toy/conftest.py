"""Make the scripts of demos/toy importable."""

import sys
from pathlib import Path

TOY_DIR = Path(__file__).resolve().parents[2] / "demos" / "toy"
sys.path.insert(0, str(TOY_DIR))
