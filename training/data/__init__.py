"""Rows of a data source into fixed-length sequences of tokens, labels and positions."""
