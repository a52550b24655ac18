"""Replaces matched sites by calls of the ops.

In go accepted matches. Out comes a jaxpr in which the equations of each are those of an op, and all
others what they were; it is the program's own where nothing was replaced.

`replacements` builds the functions that a site becomes, `site_choice` traces them, asks whether
they gain and decides between sites, and `splice` inserts their equations. Of differentiated
programs, `rules` rewrites functions with custom gradients, and `residuals` passes gathered chunks
from a forward to its backward.
"""
