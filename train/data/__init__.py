"""Data: files of text enter, and batches of tokens leave, as NumPy arrays.

`text_files` reads documents, `tokenizer` and `chat` make tokens of them, and `dataset` packs these
into sequences, in an order that a seed decides. Nothing here knows of devices.
"""
