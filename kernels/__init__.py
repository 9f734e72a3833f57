"""Formats, their PyTorch reference, operators, autograd and engines. Imports nothing above it."""
