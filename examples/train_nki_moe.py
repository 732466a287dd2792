"""Fine-tune torchtitan's Qwen3-MoE with experts by this project's operator, which is plain PyTorch off Trainium.

python examples/train_nki_moe.py [FOLDER]     needs qwen3conv[train]; about a minute on two idle cores
"""

from __future__ import annotations

import sys

from demo import MOE
from fine_tune import main

if __name__ == "__main__":
    sys.exit(main(MOE, "nki-moe"))
