"""Qwen3's routed experts as torch operators: block plan, reference, NKI kernels, operator."""
