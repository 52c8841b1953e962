"""The stack of stages and its policies."""
