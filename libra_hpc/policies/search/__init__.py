"""The best layout of each stage and the best split."""
