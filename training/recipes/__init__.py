"""Configurations for torchtitan's command line: ``--module qwen3conv.training.recipes.BACKEND --config NAME``."""
