"""Cuts a checkpoint's files as a layout reads them: `ultrascale checkpoint reshard` as a program of its own.

python tools/reshard.py runs/a/checkpoints/step-00000010 resharded --dp 1 --tp 4 --pp 2 --zero-stage 1
"""

from __future__ import annotations

import sys

from ultrascale.cli import main

if __name__ == "__main__":
    sys.exit(main(["checkpoint", "reshard", *sys.argv[1:]]))
