"""What people type: the command line and the tools behind it."""
