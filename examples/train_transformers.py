"""Fine-tune the model of transformers through torchtitan's transformers backend.

python examples/train_transformers.py [FOLDER]     needs qwen3conv[train]; about a minute on two idle cores
"""

from __future__ import annotations

import sys

from demo import DENSE
from fine_tune import main

if __name__ == "__main__":
    sys.exit(main(DENSE, "transformers"))
