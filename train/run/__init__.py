"""Runs: arguments enter, and a trained or evaluated model, a dry run or a plan leaves.

`command_line` parses and prints, `setup` opens all that a run needs, `loop` trains. Nothing in the
other folders imports from here.
"""
