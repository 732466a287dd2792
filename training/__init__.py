"""Training backends: torchtitan parts, picked and configured."""
