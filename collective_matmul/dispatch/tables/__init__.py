"""Tables of measured times: their text, their files, and looking up a request.

The input is a request. The output is the times that were measured for it or for similar requests.
"""
