"""Convert, check and train Qwen3 checkpoints."""

__version__ = "0.1.0"
