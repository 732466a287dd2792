"""Bytes on disk: readers parse headers only, writers know every offset before the first byte."""
