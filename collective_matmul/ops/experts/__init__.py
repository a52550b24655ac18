"""Experts: tokens that a router sends to experts on several devices.

Inputs are a device's tokens, its experts' weights, and the router's decisions. The output is each
token's experts, weighted and summed. xla, ring and exchange are the backends; grouped/ multiplies.
"""
