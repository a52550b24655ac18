"""Tables of measured times: their text, their files, and looking up a request.

In comes a request. Out goes what was measured for it, or for the nearest requests that were.
"""
