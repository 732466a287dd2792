"""``python -m qwen3conv``: the same as the ``qwen3conv`` command."""

from __future__ import annotations

import sys

from qwen3conv.tools.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
