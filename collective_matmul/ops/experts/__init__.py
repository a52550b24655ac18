"""Experts: tokens that a router sends to experts on several devices."""
