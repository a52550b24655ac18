"""Attention and experts, alone and as layers."""
