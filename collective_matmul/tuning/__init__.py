"""Measures backends on this machine and saves the times.

Inputs are requests. The output is a table, which `dispatch.tables` reads.
"""
